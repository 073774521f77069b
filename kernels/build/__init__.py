"""The ahead-of-time build: key list -> cubins and manifest.json."""
