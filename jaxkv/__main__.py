"""Runs the `jaxkv` command: python -m jaxkv."""

import sys

from jaxkv.api.cli import main

sys.exit(main())
