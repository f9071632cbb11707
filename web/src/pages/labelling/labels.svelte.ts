// Labels that were given, kept in this browser until they have gone where they count.

export class Labels<Label> {
  given = $state<Record<string, Label>>({});
  /** In the order in which they were given, so that the last can be taken back. */
  order = $state<string[]>([]);
  #place: string;

  constructor(name: string) {
    this.#place = `bloomery-labels-${name}`;
    try {
      const kept = JSON.parse(localStorage.getItem(this.#place) ?? "null") as { given: Record<string, Label>; order: string[] } | null;
      if (kept) ({ given: this.given, order: this.order } = kept);
    } catch {
      // What cannot be read was not written by this page.
    }
  }

  give(id: string, label: Label): void {
    this.given[id] = label;
    this.order = [...this.order.filter((each) => each !== id), id];
    this.#keep();
  }

  /** Take the last one back; its id. */
  undo(): string | undefined {
    const last = this.order.at(-1);
    if (last === undefined) return undefined;
    delete this.given[last];
    this.order = this.order.slice(0, -1);
    this.#keep();
    return last;
  }

  /** What was given stays so: whoever has seen what came of it takes nothing back. */
  settle(): void {
    this.order = [];
    this.#keep();
  }

  #keep(): void {
    localStorage.setItem(this.#place, JSON.stringify({ given: this.given, order: this.order }));
  }
}
