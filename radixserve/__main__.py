"""`python -m radixserve` is the command `radixserve`."""

import sys

from radixserve.cli.main import main

sys.exit(main())
