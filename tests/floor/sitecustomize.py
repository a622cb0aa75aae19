"""Run by each Python that tests the lowest TRL: trackio is not there, since this one needs a newer huggingface_hub.

TRL 1.0 imports every tracker that it finds. pip would install an older trackio for it, which brings all of gradio.
"""

import sys
from importlib.metadata import version

if version("huggingface_hub").startswith("0."):
    sys.modules["trackio"] = None
