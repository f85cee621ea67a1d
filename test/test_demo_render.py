"""The demo's scenes, renderer and questions: drawn pictures agree with the answers that are computed from scenes."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from spaceserve.demo import architecture as arch
from spaceserve.demo.build_atlas import HELD_OUT_FONTS, TRAIN_FONTS
from spaceserve.demo.eval import held_out_example
from spaceserve.demo.lessons import NUM_LEVELS, NUM_QUESTIONS, lesson_dialogue
from spaceserve.demo.pixels import process, to_patches
from spaceserve.demo.questions import KINDS, RELATIONS, YESNO_TOPICS, make_dialogue, random_size, yesno_topic
from spaceserve.demo.render import draw, pack_scenes, render
from spaceserve.demo.scenes import LABEL_FIELDS, MIN_CONTRAST, Scene, Shape, shapes_scene, text_scene

pytestmark = pytest.mark.cpu


def test_background_and_centres_have_the_drawn_colours() -> None:
    rng = random.Random(0)
    seen = 0
    for _ in range(40):
        scene = shapes_scene(rng, 224, 168)
        image = np.asarray(draw(scene), dtype=np.float32)
        corner = image[0, 0]
        assert np.abs(corner - scene.shades[:3]).max() < 60  # within the background's gradient
        for shape, row in zip(scene.shapes, scene.rows, strict=True):
            pixel = image[int(shape.cy), int(shape.cx)]
            if shape.shape == "ring":  # whose centre is a hole
                assert np.linalg.norm(pixel - row[8:11]) > 0.5 * MIN_CONTRAST
            else:
                assert np.abs(pixel - row[8:11]).max() <= 1
            seen += 1
    assert seen > 60


def test_shapes_do_not_overlap_and_lie_inside() -> None:
    rng = random.Random(1)
    for _ in range(200):
        width, height = random_size(rng)
        scene = shapes_scene(rng, width, height)
        assert [s.cx for s in scene.shapes] == sorted(s.cx for s in scene.shapes)
        for i, a in enumerate(scene.shapes):
            assert a.radius <= a.cx <= width - a.radius
            assert a.radius <= a.cy <= height - a.radius
            for b in scene.shapes[i + 1 :]:
                assert (a.cx - b.cx) ** 2 + (a.cy - b.cy) ** 2 > (a.radius + b.radius) ** 2


def test_labels_rank_shapes_from_left_and_from_top() -> None:
    scene = shapes_scene(random.Random(10), 336, 336, 5)
    fields = {name: [row[i] for row in scene.labels] for i, name in enumerate(LABEL_FIELDS)}
    assert len(scene.shapes) == 5
    assert fields["ordinal"] == [0, 1, 2, 3, 4]
    assert [s for _, s in sorted(zip(fields["rank"], [s.cy for s in scene.shapes], strict=True))] == sorted(
        s.cy for s in scene.shapes
    )
    assert fields["height"] == [s.cy / 336 for s in scene.shapes]


def test_edges_are_antialiased_and_areas_are_right() -> None:
    scene = Scene(200, 200, "black", shades=(0, 0, 0, 0, 0, 0, 0.0))
    half = 60 * 48 / 40
    scene.rows = [(1, 100, 100, half, half, 0.0, 0.0, 0.0, 255, 255, 255)]  # a square of radius 60
    image = np.asarray(draw(scene), dtype=np.float32)[..., 0] / 255
    side = 0.8 * 60 * 2
    assert image.sum() == pytest.approx(side * side, rel=0.03)
    assert ((image > 0.1) & (image < 0.9)).any()


def test_a_batch_draws_what_single_scenes_draw() -> None:
    rng = random.Random(2)
    scenes = [shapes_scene(rng, 140, 112, n) for n in (0, 2, 5)] + [text_scene(rng, 140, 112, "word", TRAIN_FONTS)]
    rows, shades = pack_scenes(scenes)
    together = render(torch.from_numpy(rows), torch.from_numpy(shades), 140, 112).round().to(torch.uint8)
    for image, scene in zip(together, scenes, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(draw(scene)))


def test_glyphs_of_text_stay_inside_and_differ_between_letters() -> None:
    rng = random.Random(3)
    for kind in ("digit", "letter", "word"):
        for _ in range(100):
            scene = text_scene(rng, 224, 112, kind, HELD_OUT_FONTS)
            assert scene.text_colour != scene.background
            for row in scene.rows[: len(scene.text)]:
                assert 0 < row[1] < 224
                assert 0 < row[2] < 112


def test_held_out_examples_are_reproducible_and_complete() -> None:
    kinds = set()
    for number in range(len(KINDS)):
        first, again = held_out_example(number), held_out_example(number)
        assert (first.question, first.answer) == (again.question, again.answer)
        assert all(
            np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first.images, again.images, strict=True)
        )
        kinds.add(first.kind)
    assert kinds == set(KINDS)
    assert held_out_example(11, seed=1).images[0] != first.images[0]


def test_held_out_fonts_are_not_trained_on() -> None:
    assert not set(HELD_OUT_FONTS) & set(TRAIN_FONTS)


def _scene(*shapes: Shape) -> Scene:
    return Scene(200, 200, "white", shapes=list(shapes))


def test_answers_follow_from_the_scene() -> None:
    from spaceserve.demo import questions

    scene = _scene(
        Shape("star", "red", 40, 50, 30), Shape("ring", "blue", 150, 150, 15), Shape("ring", "red", 180, 40, 15)
    )
    rng = random.Random(4)
    for _ in range(300):
        for ask in (questions.ask_larger, questions.ask_left, questions.ask_count, questions.ask_shape):
            turn = ask(rng, scene)
            if turn is None:
                continue
            if turn.kind == "larger" and "smaller" not in turn.question and "star" in turn.question:
                assert turn.answer.endswith("star")
            if turn.kind == "left" and "left" in turn.question and "star" in turn.question:
                assert turn.answer.endswith("star")
            if turn.kind == "shape":
                assert ("blue" in turn.question, turn.answer) == (True, "ring")
            if turn.kind == "count":
                expected = 2 if "red" in turn.question or "rings" in turn.question else 3
                expected = 1 if "blue" in turn.question or "stars" in turn.question else expected
                others = [c for c in questions.COLOURS if f" {c} " in turn.question and c not in ("red", "blue")]
                others += [s for s in questions.SHAPES if s + "s" in turn.question and s not in ("ring", "star")]
                others += ["cross"] if "crosses" in turn.question else []
                assert turn.answer == ("0" if others else str(expected))
    turn = questions.ask_describe(rng, scene)
    assert turn is not None
    assert turn.answer == "a red star, a blue ring and a red ring on a white background"


def _relation_holds(word: str, first: Shape, second: Shape) -> bool:
    return {
        "left of": first.cx < second.cx,
        "right of": first.cx > second.cx,
        "above": first.cy < second.cy,
        "below": first.cy > second.cy,
        "larger than": first.radius > second.radius,
        "smaller than": first.radius < second.radius,
    }[word]


@pytest.mark.parametrize("level", range(NUM_LEVELS))
def test_lessons_ask_independent_questions_that_the_scene_answers(level: int) -> None:
    rng = random.Random(8)
    topics, answers, words = set(), [], set()
    for _ in range(60):
        dialogue = lesson_dialogue(rng, random_size(rng), level)
        assert dialogue.independent
        assert len(dialogue.turns) == NUM_QUESTIONS
        scene = dialogue.scenes[0]
        for turn in dialogue.turns:
            topics.add(yesno_topic(turn.question))
            answers.append(turn.answer)
            if scene.text:
                assert turn.answer == ("yes" if turn.question[-2] == scene.text else "no")
                continue
            word = next(word for word in RELATIONS if f" {word} the " in turn.question)
            words.add(word)
            names = turn.question.removeprefix("Is the ").removesuffix("?").split(f" {word} the ")
            first, second = (
                next(s for s in scene.shapes if name in (s.shape, f"{s.colour} {s.shape}")) for name in names
            )
            assert turn.answer == ("yes" if _relation_holds(word, first, second) else "no")
    assert topics == {"relation", "character"}
    assert words == set(RELATIONS[::2] if level == 0 else RELATIONS)
    assert 0.4 < answers.count("yes") / len(answers) < 0.65


def test_every_topic_of_yes_or_no_is_recognised() -> None:
    rng = random.Random(9)
    examples = [make_dialogue(rng, [(224, 224)], "yesno", 1) for _ in range(1500)]
    topics = [yesno_topic(example.turns[0].question) for example in examples]
    assert set(topics) == set(YESNO_TOPICS)
    for example, topic in zip(examples, topics, strict=True):
        scene = example.scenes[0]
        assert topic != "character" or len(scene.text) == 1
        assert topic != "relation" or len(scene.shapes) > 1


def test_yes_and_no_are_about_equally_frequent() -> None:
    rng = random.Random(5)
    answers = [make_dialogue(rng, [(224, 224)], "yesno", 1).turns[0].answer for _ in range(2000)]
    assert 0.4 < answers.count("yes") / len(answers) < 0.6


@pytest.mark.parametrize("size", [(112, 112), (224, 140), (448, 448), (150, 333), (115, 441), (640, 480), (60, 90)])
def test_pictures_are_processed_as_transformers_does(size: tuple[int, int]) -> None:
    from transformers import Qwen2VLImageProcessor

    settings = arch.preprocessor_config()
    settings = {name: settings[name] for name in ("min_pixels", "max_pixels", "image_mean", "image_std")}
    processor = Qwen2VLImageProcessor(**settings)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize(size)
    output = processor(images=[image], return_tensors="pt")
    width, height = arch.processed_size(*size)
    assert output["image_grid_thw"].tolist() == [[1, height // 14, width // 14]]
    ours = to_patches(process(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()))[0]
    theirs = output["pixel_values"].view(-1, 3, 2, 14 * 14)
    assert torch.equal(theirs[:, :, 0], theirs[:, :, 1])
    # One grey level of the resized picture is 1 / (255 * 0.26).
    assert (ours - theirs[:, :, 0].reshape(ours.shape)).abs().max() < 1.5 / (255 * 0.26)
