#!/usr/bin/env python3
"""FlashDSA beside other libraries: the command `flashdsa-compare` of the installed package."""
import sys

from flashdsa.compare.__main__ import main

sys.exit(main())
