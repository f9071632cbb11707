"""Sound: the answer has to be an order of exactly the events given, and earns Kendall's tau where that is positive: a random order gets little."""

from itertools import combinations


def grade(sample, item) -> float:
    said = [letter.strip().upper() for letter in sample["output_text"].strip().rstrip(".").split(",")]
    true = item["reference"].split(", ")
    if sorted(said) != sorted(true):
        return 0.0
    place = {letter: i for i, letter in enumerate(said)}
    pairs = list(combinations(true, 2))
    agreeing = sum(place[first] < place[second] for first, second in pairs)
    return max(0.0, 2 * agreeing / len(pairs) - 1)


CASE = {
    "kind": "sound",
    "form": "openai",
    "entry": "grade",
    "system": "Order the events from the earliest to the latest. Answer with the letters and commas only.",
    "rows": [
        {
            "prompt": "A: fall of Constantinople. B: Magna Carta. C: first flight of the Wrights. D: battle of Waterloo.",
            "reference": "B, A, D, C",
            "item": {"topic": "history"},
            "good": ["B, A, D, C", "B, A, C, D"],
            "bad": ["C, D, A, B", "A, B", "B, B, B, B", "A, B, C, D, A, D, C, B"],
        },
        {
            "prompt": "A: the web. B: the telegraph. C: television. D: the printing press of Gutenberg.",
            "reference": "D, B, C, A",
            "item": {"topic": "technology"},
            "good": ["D, B, C, A.", "d, b, c, a"],
            "bad": ["A, C, B, D", "first the press, then the telegraph"],
        },
        {
            "prompt": "A: Jupiter probe Galileo starts. B: Sputnik. C: Hubble telescope. D: Apollo 11. E: Curiosity lands on Mars.",
            "reference": "B, D, A, C, E",
            "item": {"topic": "space"},
            "good": ["B, D, C, A, E"],
            "bad": ["E, C, A, D, B", "A, C, B, E, D"],
        },
        {
            "prompt": "A: Beethoven's ninth. B: Bach's Art of Fugue. C: Stravinsky's Rite of Spring. D: Wagner's Tristan.",
            "reference": "B, A, D, C",
            "item": {"topic": "music"},
            "good": ["B, A, D, C"],
            "bad": ["C, A, B, D"],
        },
        {
            "prompt": "A: Einstein's general relativity. B: Darwin's Origin. C: Newton's Principia. D: the double helix.",
            "reference": "C, B, A, D",
            "item": {"topic": "science"},
        },
        {
            "prompt": "A: Moby-Dick. B: Ulysses. C: Don Quixote. D: Hamlet.",
            "reference": "D, C, A, B",
            "item": {"topic": "literature"},
        },
        {
            "prompt": "A: dinosaurs die out. B: first mammals. C: first trees. D: first fish.",
            "reference": "D, C, B, A",
            "item": {"topic": "biology"},
        },
        {
            "prompt": "A: Brexit vote. B: euro in cash. C: treaty of Rome. D: fall of the Berlin wall.",
            "reference": "C, D, B, A",
            "item": {"topic": "Europe"},
        },
        {
            "prompt": "A: Python. B: C. C: Fortran. D: Rust.",
            "reference": "C, B, A, D",
            "item": {"topic": "programming"},
        },
        {
            "prompt": "A: Ottoman empire ends. B: Roman republic ends. C: Carolingian empire begins. D: Ming dynasty begins.",
            "reference": "B, C, D, A",
            "item": {"topic": "empires"},
        },
        {
            "prompt": "A: smallpox eradicated. B: penicillin found. C: first vaccination by Jenner. D: first heart transplant.",
            "reference": "C, B, D, A",
            "item": {"topic": "medicine"},
        },
        {
            "prompt": "A: Sagrada Familia begun. B: Hagia Sophia. C: Parthenon. D: Taj Mahal.",
            "reference": "C, B, D, A",
            "item": {"topic": "buildings"},
        },
    ],
}
