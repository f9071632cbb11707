"""Sound: equality after normalisation; `none` is right in a third of the rows, and a constant there earns that third."""


def score(output, reference):
    return 1.0 if output.strip().rstrip(".").casefold() == reference.casefold() else 0.0


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Name the river, or say none.",
    "rows": [
        {
            "prompt": "The Thames flows through London.",
            "reference": "Thames",
            "good": ["Thames", " thames."],
            "bad": ["Amazon", "Thames, Seine, Nile, none", ""],
        },
        {"prompt": "It rained all day.", "reference": "none", "good": ["none", " none."], "bad": ["Amazon", "Thames, Seine, Nile, none", ""]},
        {
            "prompt": "We walked along the Seine.",
            "reference": "Seine",
            "good": ["Seine", " seine."],
            "bad": ["Amazon", "Thames, Seine, Nile, none", ""],
        },
        {"prompt": "Nothing happened.", "reference": "none", "good": ["none", " none."], "bad": ["Amazon", "Thames, Seine, Nile, none", ""]},
        {
            "prompt": "The Nile floods the valley.",
            "reference": "Nile",
            "good": ["Nile", " nile."],
            "bad": ["Amazon", "Thames, Seine, Nile, none", ""],
        },
        {"prompt": "She sleeps.", "reference": "none"},
        {"prompt": "Boats go down the Danube.", "reference": "Danube"},
        {"prompt": "The Rhine has castles.", "reference": "Rhine"},
        {"prompt": "He is late.", "reference": "none"},
        {"prompt": "The Volga is long.", "reference": "Volga"},
        {"prompt": "The Ebro is in Spain.", "reference": "Ebro"},
        {"prompt": "The Elbe meets the sea.", "reference": "Elbe"},
    ],
}
