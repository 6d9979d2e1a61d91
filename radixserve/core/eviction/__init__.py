"""Which cached block is given up first when a sequence needs room."""
