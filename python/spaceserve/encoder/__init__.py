"""The encoder worker: one process that holds the encoder's weights and the feature store."""
