"""HTTP at the door, nothing behind it.

`process` serves what `app` puts together, `routes` holds one folder per contract (ten lines a route: parse, call one service, return), `auth` and
`deps` say who calls and hand out services. Codes become HTTP statuses in `errors`, and for the tinker contract in its own `errors`.
"""
