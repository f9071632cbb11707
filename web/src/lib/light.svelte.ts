// Light or dark: as the system has it, until somebody chooses.

const CHOSEN = "bloomery-light";
const system = matchMedia("(prefers-color-scheme: dark)");

class Light {
  dark = $state(false);

  constructor() {
    this.#follow();
    system.addEventListener("change", () => this.#follow());
  }

  toggle(): void {
    this.#set(!this.dark);
    localStorage.setItem(CHOSEN, this.dark ? "dark" : "light");
  }

  #follow(): void {
    const chosen = localStorage.getItem(CHOSEN);
    this.#set(chosen ? chosen === "dark" : system.matches);
  }

  #set(dark: boolean): void {
    this.dark = dark;
    document.documentElement.dataset.light = dark ? "dark" : "light";
  }
}

export const light = new Light();
