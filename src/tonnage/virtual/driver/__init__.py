"""The empty driver: stand-ins for the CUDA libraries below a CUDA build of torch, for a card that is not there."""
