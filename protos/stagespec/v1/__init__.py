"""Generated from the protos in this folder by `python -m deploy.protos`."""
