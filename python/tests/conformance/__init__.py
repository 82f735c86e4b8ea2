"""PyTorch's behaviour over a backend of torch.distributed: a table of cases, for Gloo and netsum.

python -m conformance             runs all cases on both, and prints the table
python -m conformance --write     also writes conformance/table.tsv, of which the book has a page
python -m conformance --backend netsum --case "barrier"    runs some on one
"""
