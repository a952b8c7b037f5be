"""Some reports need the real trainer, whose rig the integration tests have."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations"))
