// Small pieces of the page: elements, buttons, and the clipboard.

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function button(text, act, label = "") {
  const made = element("button", "small-button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

/** A button that copies a text, and says whether it did. */
export function copyButton(text, label) {
  const made = button("Copy", async () => {
    made.textContent = (await copied(text)) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, label);
  made.setAttribute("aria-live", "polite");
  return made;
}

/** Put a text on the clipboard; pages that are not served safely have no `navigator.clipboard`. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    return isDone;
  }
}
