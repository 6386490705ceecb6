"""Convert checkpoints: python launch/convert.py to-sharded --hf DIR --output DIR --tp 2 --pp 2"""

from __future__ import annotations

import sys

from hybrid.convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
