"""SpaceServe: vision-language serving on SGLang with the encoder beside the decoder on one GPU."""

__version__ = "0.1.0"
