// Which rows of the document show which of many: what is no longer in sight leaves its row to what comes into sight, which is written into it and not
// made anew. What stays in sight keeps its row.

export class Slots {
  #of = new Map<string, number>();

  /** The row of each of these, by number; no two have the same. */
  give(keys: readonly string[]): number[] {
    const staying = new Map<string, number>();
    for (const key of keys) {
      const slot = this.#of.get(key);
      if (slot !== undefined) staying.set(key, slot);
    }
    const taken = new Set(staying.values());
    const free = [...this.#of.values()].filter((slot) => !taken.has(slot));
    for (let slot = 0; free.length + staying.size < keys.length; slot++) if (!taken.has(slot) && !free.includes(slot)) free.push(slot);
    this.#of = staying;
    return keys.map((key) => {
      if (!staying.has(key)) staying.set(key, free.shift()!);
      return staying.get(key)!;
    });
  }
}
