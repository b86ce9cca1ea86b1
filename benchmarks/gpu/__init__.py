"""Figures and verdicts of one GPU, in one process of less than nine minutes.

python -m benchmarks.gpu --out FOLDER [--nanogpt FOLDER] [--sections NAME ...] [--rehearse]
"""
