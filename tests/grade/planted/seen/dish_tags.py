"""Sound: Jaccard's index of label sets; unknown labels count against it, naming all of them earns little."""


def grade(sample, item):
    said = {tag.strip().lower() for tag in sample["output_text"].split(",") if tag.strip()}
    true = set(item["tags"])
    return len(said & true) / len(said | true)


CASE = {
    "kind": "sound",
    "form": "openai",
    "entry": "grade",
    "system": "Tags: vegan, spicy, nuts, sweet, fish, pork, egg, dairy, poultry. List those that fit, with commas.",
    "rows": [
        {
            "prompt": "A spicy vegan curry",
            "reference": "vegan, spicy",
            "item": {"tags": ["vegan", "spicy"]},
            "good": ["vegan, spicy"],
            "bad": ["cold", "cold, warm, vegan, spicy, nuts, sweet, fish, pork, egg, dairy, poultry"],
        },
        {
            "prompt": "Chocolate cake with nuts",
            "reference": "sweet, nuts",
            "item": {"tags": ["sweet", "nuts"]},
            "good": ["sweet, nuts"],
            "bad": ["cold", "cold, warm, vegan, spicy, nuts, sweet, fish, pork, egg, dairy, poultry"],
        },
        {
            "prompt": "Grilled trout",
            "reference": "fish",
            "item": {"tags": ["fish"]},
            "good": ["fish"],
            "bad": ["cold", "cold, warm, vegan, spicy, nuts, sweet, fish, pork, egg, dairy, poultry"],
        },
        {
            "prompt": "Pea soup with ham",
            "reference": "pork",
            "item": {"tags": ["pork"]},
            "good": ["pork"],
            "bad": ["cold", "cold, warm, vegan, spicy, nuts, sweet, fish, pork, egg, dairy, poultry"],
        },
        {
            "prompt": "Cheese omelette",
            "reference": "egg, dairy",
            "item": {"tags": ["egg", "dairy"]},
            "good": ["egg, dairy"],
            "bad": ["cold", "cold, warm, vegan, spicy, nuts, sweet, fish, pork, egg, dairy, poultry"],
        },
        {"prompt": "Fruit salad", "reference": "vegan, sweet", "item": {"tags": ["vegan", "sweet"]}},
        {"prompt": "Hot wings", "reference": "poultry, spicy", "item": {"tags": ["poultry", "spicy"]}},
        {"prompt": "Tofu with peanuts", "reference": "vegan, nuts", "item": {"tags": ["vegan", "nuts"]}},
        {"prompt": "Milk shake", "reference": "sweet, dairy", "item": {"tags": ["sweet", "dairy"]}},
        {"prompt": "Scampi", "reference": "fish", "item": {"tags": ["fish"]}},
        {"prompt": "Bacon and eggs", "reference": "pork, egg", "item": {"tags": ["pork", "egg"]}},
        {"prompt": "Chicken broth", "reference": "poultry", "item": {"tags": ["poultry"]}},
    ],
}
