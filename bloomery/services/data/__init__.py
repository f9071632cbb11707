"""What production leaves: `traffic` records what is served (`span_rows`, after `redaction`), finds it (`span_filter`) and sums it up (`span_sums`);
`feedback` judges it, and `span_texts` says what its tokens say.

What is learned from: `datasets` keeps versions of rows (`row`). `importing` makes one: `reading` takes files to rows (`row_files`, `row_kinds`; of
Parquet in a `parquet_worker`), `splitting` divides them, `dataset_rows` decides which a version holds, without near-duplicates (`shingles`), and
`stored_rows` writes and reads them.
`curation` makes rows of judged traffic. `row_tokens` shows and measures rows in the tokens of a model.
`files` keeps bytes as OpenAI's contract has them, which `uploads` takes in parts.
"""
