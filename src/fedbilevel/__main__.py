"""`python -m fedbilevel`, and `torchrun ... -m fedbilevel`."""

from fedbilevel.cli import main

main()
