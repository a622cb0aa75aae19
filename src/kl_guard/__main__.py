"""`python -m kl_guard` is `kl-guard`."""

import sys

from kl_guard.cli import main

sys.exit(main())
