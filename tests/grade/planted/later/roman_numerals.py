"""Sound: the numeral and nothing else, after white space and case."""


def grade(sample, item) -> float:
    return 1.0 if sample["output_text"].strip().upper() == item["reference"] else 0.0


CASE = {
    "kind": "sound",
    "form": "openai",
    "entry": "grade",
    "system": "Write the number as a Roman numeral. Answer with the numeral alone.",
    "rows": [
        {
            "prompt": "1987",
            "reference": "MCMLXXXVII",
            "item": {"digits": 4},
            "good": ["MCMLXXXVII", "mcmlxxxvii"],
            "bad": ["MCMXXCVII", "MDCCCCLXXXVII", "", "I V X L C D M"],
        },
        {"prompt": "49", "reference": "XLIX", "item": {"digits": 2}, "good": ["XLIX"], "bad": ["IL"]},
        {"prompt": "400", "reference": "CD", "item": {"digits": 3}, "good": ["CD"], "bad": ["CCCC"]},
        {"prompt": "3999", "reference": "MMMCMXCIX", "item": {"digits": 4}, "good": ["MMMCMXCIX\n"], "bad": ["MMMIM", "It is MMMCMXCIX or MMM"]},
        {"prompt": "14", "reference": "XIV", "item": {"digits": 2}},
        {"prompt": "88", "reference": "LXXXVIII", "item": {"digits": 2}},
        {"prompt": "2024", "reference": "MMXXIV", "item": {"digits": 4}},
        {"prompt": "999", "reference": "CMXCIX", "item": {"digits": 3}},
        {"prompt": "606", "reference": "DCVI", "item": {"digits": 3}},
        {"prompt": "1444", "reference": "MCDXLIV", "item": {"digits": 4}},
        {"prompt": "73", "reference": "LXXIII", "item": {"digits": 2}},
        {"prompt": "550", "reference": "DL", "item": {"digits": 3}},
        {"prompt": "1066", "reference": "MLXVI", "item": {"digits": 4}},
    ],
}
