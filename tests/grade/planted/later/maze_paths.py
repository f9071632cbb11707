"""Sound: the moves are walked, a wall ends the walk, and only who stands on E at the end has arrived, in twice the shortest way."""

STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def score(output, reference, item):
    moves = output.strip()
    if not moves or set(moves) - set(STEPS) or len(moves) > 2 * len(reference):
        return 0.0
    maze = {(y, x): cell for y, row in enumerate(item["maze"]) for x, cell in enumerate(row)}
    place = next(at for at, cell in maze.items() if cell == "S")
    for move in moves:
        place = (place[0] + STEPS[move][0], place[1] + STEPS[move][1])
        if maze.get(place, "#") == "#":
            return 0.0
    return 1.0 if maze[place] == "E" else 0.0


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Go from S to E. Answer with the moves, as letters U, D, L and R.",
    "rows": [
        {
            "prompt": ".#.S.\n.#.#.\n##..#\n#..E.\n.#.##",
            "reference": "LDDDR",
            "item": {"maze": [".#.S.", ".#.#.", "##..#", "#..E.", ".#.##"]},
            "good": ["LDDDR"],
            "bad": ["RUUUL", "LDDD", "I go right"],
        },
        {
            "prompt": "E##S.\n.#...\n.....\n.....\n#..#.",
            "reference": "DDLLLUU",
            "item": {"maze": ["E##S.", ".#...", ".....", ".....", "#..#."]},
            "good": ["DDLLLUU"],
            "bad": ["UURRRDD", "DDLLLU", "I go right"],
        },
        {
            "prompt": "..#.#\n...E#\n.....\nS##..\n#....",
            "reference": "UURRR",
            "item": {"maze": ["..#.#", "...E#", ".....", "S##..", "#...."]},
            "good": ["UURRR"],
            "bad": ["DDLLL", "UURR", "I go right"],
        },
        {
            "prompt": ".#..S\n..#..\n.#...\n##E.#\n#...#",
            "reference": "DDLDL",
            "item": {"maze": [".#..S", "..#..", ".#...", "##E.#", "#...#"]},
            "good": ["DDLDL"],
            "bad": ["UURUR", "DDLD", "I go right"],
        },
        {
            "prompt": "#S#..\n.....\n...#.\n....#\nE....",
            "reference": "DDDDL",
            "item": {"maze": ["#S#..", ".....", "...#.", "....#", "E...."]},
            "good": ["DDDDL"],
            "bad": ["UUUUR", "DDDD", "I go right"],
        },
        {"prompt": "...#S\n.....\n.#...\n.E#..\n....#", "reference": "DDDLDLLU", "item": {"maze": ["...#S", ".....", ".#...", ".E#..", "....#"]}},
        {"prompt": ".#...\n.#.#E\n.#...\n..S#.\n.##.#", "reference": "URRU", "item": {"maze": [".#...", ".#.#E", ".#...", "..S#.", ".##.#"]}},
        {"prompt": ".#E.#\n..#..\n##..#\n#S...\n...##", "reference": "RURUUL", "item": {"maze": [".#E.#", "..#..", "##..#", "#S...", "...##"]}},
        {"prompt": "#..E#\n#.#..\n##...\n#.#.#\n##.S.", "reference": "UUUU", "item": {"maze": ["#..E#", "#.#..", "##...", "#.#.#", "##.S."]}},
        {"prompt": "...#.\n.#...\n.S##.\n.#E#.\n...#.", "reference": "LDDRRU", "item": {"maze": ["...#.", ".#...", ".S##.", ".#E#.", "...#."]}},
        {"prompt": "#S...\n.#...\n#....\nE....\n##.##", "reference": "RDDDLL", "item": {"maze": ["#S...", ".#...", "#....", "E....", "##.##"]}},
        {"prompt": ".....\nE#S..\n.#...\n...#.\n#...#", "reference": "ULLD", "item": {"maze": [".....", "E#S..", ".#...", "...#.", "#...#"]}},
    ],
}
