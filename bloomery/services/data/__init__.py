"""What production leaves: `traffic` records what is served (`span_rows`, after `redaction`), and `feedback` judges it.

`curation` makes of both what `datasets` keeps (`dataset_rows`, without near-duplicates: `shingles`).
"""
