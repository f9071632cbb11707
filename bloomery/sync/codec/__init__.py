"""Weight deltas, format BD1: what changed between two sets of weights of one layout, in as few bytes as the receiver's own weights allow.

`layout` names the tensors and cuts their elements into chunks, and says what a set of weights is to whoever encodes or applies. No torch.
"""
