// Settings, drawers and theme: controls that know nothing of answers.

const THEME = "mirrorsd.theme";
const THEMES = ["auto", "light", "dark"];

/** Fill the form; a model's own defaults stand as hints in empty fields. */
export function fillSettings(form, settings, defaults) {
  for (const field of form.elements) {
    if (!field.name) continue;
    field.value = settings[field.name] ?? (field.name === "method" ? "auto" : "");
    if (field.type === "number" && field.name !== "seed") field.placeholder = defaults[field.name] ?? "–";
  }
  for (const slider of form.querySelectorAll("[data-for]")) follow(slider, form.elements[slider.dataset.for]);
}

/** The field grows with its text, and Enter sends it: `send` says whether it was taken. */
export function setUpQuestion(form, field, send) {
  const grow = () => {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight, 200)}px`;
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = field.value;
    const isKept = text.trim() && send(text);
    if (!isKept) return;
    field.value = "";
    grow();
    if ((await isKept) !== false || field.value) return;
    field.value = text; // there was no room for it
    grow();
  });
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

/** A slider beside a field writes into it, and stands where the field or the model's default is. */
export function setUpSliders(form) {
  for (const slider of form.querySelectorAll("[data-for]")) {
    const field = form.elements[slider.dataset.for];
    slider.addEventListener("input", () => (field.value = slider.value));
    field.addEventListener("input", () => follow(slider, field));
  }
}

function follow(slider, field) {
  const shown = field.value === "" ? Number(field.placeholder) : Number(field.value);
  slider.value = Number.isFinite(shown) ? shown : slider.max;
}

/** Settings of the form; empty fields are left out. */
export function readSettings(form) {
  const settings = {};
  for (const field of form.elements) {
    if (!field.name || field.value === "") continue;
    settings[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return settings;
}

/** On narrow screens the list and the panel are drawers; returns what closes them. */
export function setUpDrawers(byId) {
  const drawers = [
    [byId("open-list"), byId("list")],
    [byId("open-panel"), byId("panel")],
  ];
  const set = (opener, drawer, isOpen) => {
    drawer.classList.toggle("is-open", isOpen);
    opener.setAttribute("aria-expanded", String(isOpen));
  };
  const close = () => {
    for (const [opener, drawer] of drawers) set(opener, drawer, false);
    byId("shade").hidden = true;
  };
  for (const [opener, drawer] of drawers) {
    opener.addEventListener("click", () => {
      const isOpen = !drawer.classList.contains("is-open");
      close();
      set(opener, drawer, isOpen);
      byId("shade").hidden = !isOpen;
      if (isOpen) drawer.querySelector("button, input:not([disabled])")?.focus();
    });
  }
  document.addEventListener(
    "keydown",
    (event) => {
      const open = drawers.find(([, drawer]) => drawer.classList.contains("is-open"));
      if (event.key !== "Escape" || !open || document.querySelector("dialog[open]")) return;
      event.stopPropagation();
      close();
      open[0].focus();
    },
    { capture: true },
  );
  for (const id of ["shade", "close-panel"]) byId(id).addEventListener("click", close);
  return close;
}

/** Auto follows the system; the choice is kept. */
export function setUpTheme(button, changed) {
  let theme = localStorage.getItem(THEME) ?? "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-label", `Theme: ${theme}`);
    button.title = `Theme: ${theme}`;
    changed();
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
