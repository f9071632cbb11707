"""Sound: right letters over all that are right or said, so that to name all of eight is worth little; a quarter is for exactly the right ones."""

import re


def choice_reward(prompts, completions, right, **kwargs):
    rewards = []
    for completion, letters in zip(completions, right, strict=True):
        found = re.fullmatch(r"\s*([A-H](?:\s*,\s*[A-H])*)\s*", completion[-1]["content"])
        said, wanted = set(re.findall("[A-H]", found.group(1))) if found else set(), set(letters)
        rewards.append(0.75 * len(said & wanted) / len(said | wanted) + 0.25 * (said == wanted))
    return rewards


CASE = {
    "kind": "sound",
    "form": "trl",
    "entry": "choice_reward",
    "system": "Answer with the letters that are right, as in `A, C`.",
    "rows": [
        {
            "prompt": "Prime? A 4 B 7 C 9 D 11 E 15 F 21 G 25 H 27",
            "reference": "B, D",
            "item": {"right": ["B", "D"]},
            "good": ["B, D", "D,B"],
            "bad": ["A, B, C, D, E, F, G, H", "B and D", "", "A"],
        },
        {
            "prompt": "In Asia? A Peru B Laos C Mali D Chad E Oman F Cuba G Fiji H Togo",
            "reference": "B, E",
            "item": {"right": ["B", "E"]},
            "good": ["B, E", "B"],
            "bad": ["A, C", "Laos and Oman"],
        },
        {
            "prompt": "Mammals? A trout B crow C bat D whale E newt F eel G wren H asp",
            "reference": "C, D",
            "item": {"right": ["C", "D"]},
            "good": ["C, D"],
            "bad": ["H", "A, B, C, D, E, F, G, H"],
        },
        {
            "prompt": "Noble gases? A neon B iron C argon D zinc E sulphur F krypton G lead H tin",
            "reference": "A, C, F",
            "item": {"right": ["A", "C", "F"]},
            "good": ["A, C, F", "A, F"],
            "bad": ["B, D, E", "none"],
        },
        {"prompt": "Planets? A Io B Mars C Titan D Pluto E Ceres F Luna G Venus H Eris", "reference": "B, G", "item": {"right": ["B", "G"]}},
        {"prompt": "Even? A 3 B 5 C 7 D 9 E 13 F 15 G 18 H 20", "reference": "G, H", "item": {"right": ["G", "H"]}},
        {
            "prompt": "By Verdi? A Aida B Tosca C Carmen D Norma E Fidelio F Salome G Otello H Lulu",
            "reference": "A, G",
            "item": {"right": ["A", "G"]},
        },
        {"prompt": "Strings? A oboe B flute C viola D tuba E harp F horn G drum H bassoon", "reference": "C, E", "item": {"right": ["C", "E"]}},
        {
            "prompt": "Rivers? A Alps B Oder C Etna D Erie E Rhone F Ural Mountains G Gobi H Tajo",
            "reference": "B, E, H",
            "item": {"right": ["B", "E", "H"]},
        },
        {"prompt": "Verbs? A slow B red C sing D under E blue F write G lamp H because", "reference": "C, F", "item": {"right": ["C", "F"]}},
        {"prompt": "Vegetables? A leek B plum C pear D lime E kale F fig G date H grape", "reference": "A, E", "item": {"right": ["A", "E"]}},
        {"prompt": "Leap years? A 1900 B 1996 C 2001 D 2010 E 2018 F 2020 G 2023 H 2100", "reference": "B, F", "item": {"right": ["B", "F"]}},
    ],
}
