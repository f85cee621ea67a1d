"""The main process: images are admitted from their headers, placeholders expanded, work handed on."""
