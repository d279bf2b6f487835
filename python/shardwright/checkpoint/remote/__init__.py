"""Addresses of fsspec, such as s3://bucket/run: checkpoints are local folders whose copies lie there (docs/design/checkpoint_load.md)."""
