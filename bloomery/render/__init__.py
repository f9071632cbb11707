"""Messages to tokens and back: no torch, no `transformers`.

`ChatTokenizer` is a model directory's tokenizer with its chat template. `directory` reads the files, `training` says which tokens the loss sees and
`rows` renders rows of data sets by it, `control` keeps text from forging control tokens, `spelling` gives the bytes of a token, `length` how few
tokens a text can have. A template is a program that came with the weights: `chatml` knows the plainest one by heart, every other runs in a `sandbox`,
a process (`worker`) with limits on time and memory. `tools` reads the calls that a model writes in the dialect of its template, `tool_grammar` says
how it must write them.
"""

from bloomery.render.tokenizer import ChatTokenizer
from bloomery.render.training import Rendered

__all__ = ["ChatTokenizer", "Rendered"]
