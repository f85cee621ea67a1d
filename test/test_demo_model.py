"""The demo model's tokenizer, checkpoint and training against the stock classes of transformers."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from spaceserve.demo import PICTURE, QUESTION, RIGHT_ANSWER, model_path
from spaceserve.demo import architecture as arch
from spaceserve.demo.answer import answer_batch, exact_match, held_out_set
from spaceserve.demo.ask import picture_scene, right_answer
from spaceserve.demo.data import MAX_ANSWER_TOKENS, build_sequence, pack_batch, training_batch
from spaceserve.demo.eval import TransformersModel, count_topics, held_out_example, is_right, messages, table
from spaceserve.demo.lessons import NUM_LEVELS, Lessons, Plan, lesson_dialogue
from spaceserve.demo.model import DemoModel
from spaceserve.demo.optimiser import FlatAdamW
from spaceserve.demo.questions import KINDS, Dialogue, all_wording, decorate, make_dialogue
from spaceserve.demo.render import draw
from spaceserve.demo.tokenizer import decode, encode, special_id, vocabulary
from spaceserve.demo.train import Trainee
from spaceserve.demo.untrained import write_untrained

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrained")
    write_untrained(folder)
    return folder


@pytest.fixture(scope="module")
def stock(untrained: Path) -> TransformersModel:
    return TransformersModel(untrained, "cpu", "float32")


@pytest.fixture(scope="module")
def own(untrained: Path) -> DemoModel:
    model = DemoModel()
    model.load_state_dict({k: v.float() for k, v in load_file(untrained / "model.safetensors").items()})
    return model.eval()


def test_tokenizer_encodes_any_text(stock: TransformersModel) -> None:
    tokenizer = stock.processor.tokenizer
    for text in [
        "Naïve 漢字 🙂",
        "x_y  3 12\n\n tab\t",
        "",
        " red",
        "RED Red red",
        "\x00\x7f",
        "<|im_start|>",
        "á\u0301",
    ]:
        ids = tokenizer(text).input_ids
        assert max(ids, default=0) < arch.VOCAB_SIZE
        assert tokenizer.decode(ids) == text


def test_fast_encoding_is_the_tokenizers(stock: TransformersModel) -> None:
    rng = random.Random(0)
    texts = all_wording()
    for _ in range(300):
        dialogue = make_dialogue(rng, [(224, 224)], None, 3)
        texts += [
            f"<|im_start|>user\n{t.question}<|im_end|>\n<|im_start|>assistant\n{t.answer}" for t in dialogue.turns
        ]
    for text in texts:
        assert encode(text) == stock.processor.tokenizer(text).input_ids
    assert decode(encode("the red circle")) == "the red circle"


def test_wording_is_in_the_vocabulary() -> None:
    questions = [text for text in all_wording() if text.endswith("?") and "Hello" not in text]
    spelled = [t for t in questions if sum(i < 256 and chr(i).isalpha() for i in encode(t)) > 1]
    assert spelled == []
    assert len(vocabulary()) + 256 <= arch.VOCAB_SIZE


def test_weights_fit_the_repository(untrained: Path) -> None:
    assert (untrained / "model.safetensors").stat().st_size <= 6_000_000


def test_sequences_follow_the_chat_template(stock: TransformersModel) -> None:
    rng = random.Random(1)
    for sizes in ([(112, 140)], [(112, 112), (140, 168)]):
        for _ in range(10):
            dialogue = make_dialogue(rng, sizes, None, 3)
            decorate(rng, dialogue)
            grids = [(h // 28, w // 28) for w, h in sizes]
            ids, positions, places, segments = build_sequence(dialogue, grids)
            assert set(segments) == {0}
            pictures = [{"type": "image"} for _ in sizes]
            chat: list[dict[str, object]] = []
            if dialogue.system:
                chat.append({"role": "system", "content": dialogue.system})
            for number, turn in enumerate(dialogue.turns):
                text = {"type": "text", "text": turn.question}
                content = ([text, *pictures] if dialogue.text_first else [*pictures, text]) if number == 0 else [text]
                chat += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
            text = stock.processor.apply_chat_template(chat, tokenize=False)
            inputs = stock.processor(text=[text], images=[draw(s) for s in dialogue.scenes], return_tensors="pt")
            assert inputs["input_ids"][0].tolist() == ids
            expected, _ = stock.model.model.get_rope_index(
                inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
            )
            assert torch.equal(expected[:, 0], torch.from_numpy(positions).long())
            answers = "".join(f"{turn.answer}<|im_end|>" for turn in dialogue.turns)
            assert [ids[p] for p in places] == encode(answers)


def test_greedy_answers_equal_transformers(stock: TransformersModel, own: DemoModel) -> None:
    rng = random.Random(2)
    distinct = set()
    for sizes in ([(112, 112)], [(130, 115)], [(112, 140), (168, 112)]):
        dialogue = make_dialogue(rng, sizes, None, 1)
        batch = pack_batch([dialogue], with_answers=False, spare_tokens=MAX_ANSWER_TOKENS)
        ours = answer_batch(own, batch, torch.device("cpu"))[0]
        theirs = stock.ask([draw(scene) for scene in dialogue.scenes], dialogue.turns[0].question)
        # An untrained model speaks on until its limit, which is smaller for ours.
        assert theirs.startswith(ours.rstrip("\ufffd"))
        distinct.add(theirs)
    assert len(distinct) == 3


def test_evaluation_counts_topics_and_can_be_stopped(own: DemoModel) -> None:
    batches = held_out_set(5, 3, ("yesno",))
    assert exact_match(own, batches, torch.device("cpu"), lambda: True) == {}
    result = exact_match(own, batches[:2], torch.device("cpu"))
    assert result["yesno"][1] == 2
    assert sum(asked for kind, (_, asked) in result.items() if kind != "yesno") == 2


def test_padding_changes_nothing(own: DemoModel) -> None:
    rng = random.Random(3)
    dialogues = [make_dialogue(rng, [(112, 112)], "colour", n) for n in (1, 4)]
    batch = pack_batch(dialogues)
    features = torch.randn(2 * 16, arch.HIDDEN_SIZE)
    tokens, positions = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.positions)
    image = special_id("<|image_pad|>")
    both = own.hidden(tokens, positions, features, image)
    length = int(batch.lengths[0])
    alone = own.hidden(tokens[:1, :length], positions[:, :1, :length], features[:16], image)
    torch.testing.assert_close(both[0, :length], alone[0], atol=1e-4, rtol=1e-4)


def test_an_independent_turn_is_read_as_the_only_one(own: DemoModel) -> None:
    rng = random.Random(5)
    lesson = lesson_dialogue(rng, (112, 140), NUM_LEVELS - 1)
    features = torch.randn(4 * 5, arch.HIDDEN_SIZE)
    image = special_id("<|image_pad|>")

    def answers_of(dialogue: Dialogue) -> torch.Tensor:
        """Return the hidden states of the tokens that are to be learnt."""
        batch = pack_batch([dialogue])
        segments = None if batch.segments is None else torch.from_numpy(batch.segments)
        assert (segments is not None) == dialogue.independent
        tokens, positions = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.positions)
        return own.hidden(tokens, positions, features, image, segments)[0, torch.from_numpy(batch.target_index)]

    alone = torch.cat([answers_of(Dialogue(lesson.scenes, [turn])) for turn in lesson.turns])
    torch.testing.assert_close(answers_of(lesson), alone, atol=1e-4, rtol=1e-4)
    lesson.independent = False  # else the turns read one another
    assert (answers_of(lesson) - alone)[-1].abs().max() > 1e-2


def test_flat_optimiser_is_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    flat = FlatAdamW(ours, torch.float32, weight_decay=0.1, max_norm=1e9)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98))
    for _ in range(5):
        x = torch.randn(4, 5)
        ours(x).square().sum().backward()
        theirs(x).square().sum().backward()
        flat.step(0.01)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_weights_of_runs_without_the_vertical_head_can_be_resumed() -> None:
    trainee = Trainee(1)
    names = list(dict(trainee.named_parameters()))
    assert names[-2:] == ["heads.vertical.weight", "heads.vertical.bias"]
    fresh = trainee.heads.vertical.weight.detach().clone()
    optimiser = FlatAdamW(trainee, torch.float32)
    optimiser.load(torch.full((optimiser.slices["heads.vertical.weight"].start,), 0.25))
    assert (trainee.heads.out.bias == 0.25).all()
    assert torch.equal(trainee.heads.vertical.weight, fresh)


def test_training_batches_mark_the_answers() -> None:
    rng = random.Random(4)
    for _ in range(10):
        batch = training_batch(rng, 4000)
        flat = batch.tokens.reshape(-1)
        assert np.array_equal(flat[batch.target_index + 1], batch.targets)
        ends = (batch.targets == special_id("<|im_end|>")).sum()
        assert ends % len(batch.tokens) == 0
        assert batch.tokens.shape == batch.positions.shape[1:]


def test_lessons_are_a_share_of_the_batches() -> None:
    rng = random.Random(6)
    with_segments = 0
    for _ in range(10):
        batch = training_batch(rng, 4000, Lessons(0.5))
        flat = batch.tokens.reshape(-1)
        assert np.array_equal(flat[batch.target_index + 1], batch.targets)
        assert len(batch.pictures) == 1 or batch.segments is None
        with_segments += batch.segments is not None
    assert with_segments > 3


def test_a_plan_goes_from_easy_lessons_to_the_mixture() -> None:
    plan = Plan(0.5, 0.1)
    rng = random.Random(7)
    highest = []
    for progress in (0.0, 0.1, 0.2, 0.3, 0.6, 0.7, 1.0):
        plan.progress.value = progress
        lessons = plan.now()
        assert lessons.share == (0.5 if progress < 2 / 3 else 0.1)
        highest.append(max(lessons.level(rng) for _ in range(50)))
    assert highest == [0, 1, 3, 4, 4, 4, 4]
    assert {plan.now().level(rng) for _ in range(50)} == {NUM_LEVELS - 1}


def test_topics_are_counted_once() -> None:
    kinds, questions = ["yesno", "yesno", "letter"], ["Is the letter F?", "Is the star above the ring?", "Read it."]
    topics = count_topics(kinds, questions, [True, False, True])
    assert topics == {"yesno: character": (1, 1), "yesno: relation": (0, 1)}
    assert table({"yesno": (1, 2), **topics}).splitlines()[-1].split() == ["all", "50.0", "%", "of", "2"]


def test_messages_carry_pictures() -> None:
    content = messages([draw(picture_scene())], "What is this?")[0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.fixture(scope="module")
def bundled() -> TransformersModel:
    return TransformersModel(model_path(), "cpu", "float32")


def test_bundled_picture_shows_the_right_answer() -> None:
    assert right_answer() == RIGHT_ANSWER
    with Image.open(PICTURE) as image:
        stored = np.asarray(image.convert("RGB"), dtype=np.int16)
    assert np.abs(stored - np.asarray(draw(picture_scene()), dtype=np.int16)).max() <= 1


def test_bundled_model_answers_the_bundled_question(bundled: TransformersModel) -> None:
    with Image.open(PICTURE) as image:
        assert bundled.ask([image.convert("RGB")], QUESTION) == RIGHT_ANSWER


def test_bundled_model_answers_held_out_questions(bundled: TransformersModel) -> None:
    examples = [held_out_example(number, seed=7) for number in range(4 * len(KINDS))]
    right = [is_right(example, bundled.ask(example.images, example.question)) for example in examples]
    # 96 % of many thousands are right; as few as 40 of 48 would be a broken model or processor.
    assert sum(right) > 40


def test_bundled_model_fits_the_repository() -> None:
    assert (model_path() / "model.safetensors").stat().st_size <= 6_000_000
    stored = load_file(model_path() / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
