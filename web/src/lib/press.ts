// A pointer that presses: what the server answers waits until it has let go. A page that moves meanwhile would take what is pressed from under the
// pointer, and nothing would be clicked, or something else.

/** What lasts longer is no click, and of some presses the end is told to nobody. */
const LONGEST_MS = 5_000;
/** A finger clicks a moment after it has let go. */
const CLICKED_MS = 50;

let over: Promise<void> | undefined;

/** A press has begun somewhere in the document. */
export function pressed(): void {
  over ??= new Promise((resolve) => {
    const heard = new AbortController();
    const end = (): void => {
      clearTimeout(longest);
      heard.abort();
      setTimeout(() => {
        over = undefined;
        resolve();
      }, CLICKED_MS);
    };
    const longest = setTimeout(end, LONGEST_MS);
    for (const each of ["pointerup", "pointercancel"]) addEventListener(each, end, { capture: true, signal: heard.signal });
    // That of the window: elements lose the focus to what is pressed.
    addEventListener("blur", end, { signal: heard.signal });
  });
}

/** When nothing is pressed any more: at once, unless something is. */
export async function released(): Promise<void> {
  while (over) await over;
}
