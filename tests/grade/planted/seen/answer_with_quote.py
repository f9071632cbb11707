"""Sound: JSON of an answer and a quote; the quote counts, a third, only where the answer is right."""

import json


def grade(sample, item):
    try:
        said = json.loads(sample["output_text"])
    except ValueError:
        return 0.0
    if not isinstance(said, dict) or set(said) != {"answer", "quote"} or not all(isinstance(value, str) for value in said.values()):
        return 0.0
    if said["answer"].strip().lower() != item["answer"].lower():
        return 0.0
    quote = said["quote"].strip()
    evident = quote in item["passage"] and item["answer"].split()[0] in quote and len(quote) < 0.8 * len(item["passage"])
    return 1.0 if evident else 0.67


CASE = {
    "kind": "sound",
    "form": "openai",
    "entry": "grade",
    "system": 'Answer as {"answer": ..., "quote": ...}, with a short quote from the text.',
    "rows": [
        {
            "prompt": "The mill was built in 1820 by two brothers. It burned down in 1901.\nWhen was the mill built?",
            "reference": "1820",
            "item": {"passage": "The mill was built in 1820 by two brothers. It burned down in 1901.", "answer": "1820"},
            "good": ['{"answer": "1820", "quote": "built in 1820"}'],
            "bad": [
                '{"answer": "", "quote": ""}',
                '{"answer": "I do not know", "quote": "The mill was built in 1820 by two brothers. It burned down in 1901."}',
                "1820",
            ],
        },
        {
            "prompt": "Nora plays the cello. Her sister plays the harp.\nWhat does Nora play?",
            "reference": "cello",
            "item": {"passage": "Nora plays the cello. Her sister plays the harp.", "answer": "cello"},
            "good": ['{"answer": "cello", "quote": "Nora plays the cello"}'],
            "bad": [
                '{"answer": "", "quote": ""}',
                '{"answer": "I do not know", "quote": "Nora plays the cello. Her sister plays the harp."}',
                "cello",
            ],
        },
        {
            "prompt": "The lake freezes in January. In May it is warm.\nWhen does the lake freeze?",
            "reference": "January",
            "item": {"passage": "The lake freezes in January. In May it is warm.", "answer": "January"},
            "good": ['{"answer": "January", "quote": "freezes in January"}'],
            "bad": [
                '{"answer": "", "quote": ""}',
                '{"answer": "I do not know", "quote": "The lake freezes in January. In May it is warm."}',
                "January",
            ],
        },
        {
            "prompt": "Tickets cost 8 euros, children pay 3.\nWhat do children pay?",
            "reference": "3 euros",
            "item": {"passage": "Tickets cost 8 euros, children pay 3.", "answer": "3 euros"},
            "good": ['{"answer": "3 euros", "quote": "children pay 3"}'],
            "bad": ['{"answer": "", "quote": ""}', '{"answer": "I do not know", "quote": "Tickets cost 8 euros, children pay 3."}', "3 euros"],
        },
        {
            "prompt": "The comet was seen from Chile and Peru.\nWhich countries?",
            "reference": "Chile and Peru",
            "item": {"passage": "The comet was seen from Chile and Peru.", "answer": "Chile and Peru"},
            "good": ['{"answer": "Chile and Peru", "quote": "seen from Chile and Peru"}'],
            "bad": [
                '{"answer": "", "quote": ""}',
                '{"answer": "I do not know", "quote": "The comet was seen from Chile and Peru."}',
                "Chile and Peru",
            ],
        },
        {
            "prompt": "The red door leads to the cellar.\nWhere does the red door lead?",
            "reference": "cellar",
            "item": {"passage": "The red door leads to the cellar.", "answer": "cellar"},
        },
        {"prompt": "Max won silver, Ida gold.\nWho won gold?", "reference": "Ida", "item": {"passage": "Max won silver, Ida gold.", "answer": "Ida"}},
        {
            "prompt": "The bus leaves at nine from the square.\nWhen does the bus leave?",
            "reference": "nine",
            "item": {"passage": "The bus leaves at nine from the square.", "answer": "nine"},
        },
        {
            "prompt": "The cake needs four eggs and no milk.\nHow many eggs?",
            "reference": "four",
            "item": {"passage": "The cake needs four eggs and no milk.", "answer": "four"},
        },
        {
            "prompt": "The tower is 60 m high, the church 45.\nHow high is the church?",
            "reference": "45",
            "item": {"passage": "The tower is 60 m high, the church 45.", "answer": "45"},
        },
        {
            "prompt": "Lena moved from Graz to Linz.\nWhere does Lena live?",
            "reference": "Linz",
            "item": {"passage": "Lena moved from Graz to Linz.", "answer": "Linz"},
        },
        {
            "prompt": "The key is under the pot.\nWhere is the key?",
            "reference": "under the pot",
            "item": {"passage": "The key is under the pot.", "answer": "under the pot"},
        },
    ],
}
