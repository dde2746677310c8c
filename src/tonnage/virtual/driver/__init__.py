"""The stub driver: stand-ins for the CUDA libraries below a CUDA build of torch."""
