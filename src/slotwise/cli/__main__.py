"""python -m slotwise.cli"""

import sys

from slotwise.cli import main

sys.exit(main())
