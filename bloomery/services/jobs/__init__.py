"""Managed jobs: `jobs` makes, shows and steers them, `leases` gives them to processes, one at a time, and hears what these did (`job_rows`);
`followed` shows them to who tells trackers.

`chains` makes several of which each begins where one before it ends, if its gate holds (`gates`). `attacks` looks whether the graders of rewards
can be trusted, `agents` knows those of many turns that are elsewhere, `estimates` says what one would take, `model_cards` what is known of what came
of one (`card_text` writes it down), and `fine_tuning` makes them of files, as OpenAI's contract asks for them.
"""
