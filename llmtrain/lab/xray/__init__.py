"""The pages of an x-ray."""
