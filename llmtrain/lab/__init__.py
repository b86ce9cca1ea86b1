"""Looks at runs, predicts them and checks machines. The trainer imports nothing of it."""
