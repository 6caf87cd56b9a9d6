"""`python -m fedbilevel`, and `torchrun ... -m fedbilevel`."""

from fedbilevel.cli.main import main

main()
