"""What benchmarks/gateway.py is made of: processes to compare, clients that load them, one module per group of figures."""
