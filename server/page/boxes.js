// The boxes of the conversation that is shown: those that show what they should stay as they are.

export class Boxes {
  constructor(list, colours) {
    this.list = list;
    this.colours = colours;
    this.shown = []; // in order: {key, box}
  }

  /** Show these in order, each {key, make}: `make` gives a box, `key` is what it depends on. */
  show(wanted) {
    const changed = wanted.findIndex(({ key }, place) => key !== this.shown[place]?.key);
    const kept = changed < 0 ? wanted.length : changed;
    for (const { box } of this.shown.splice(kept)) {
      this.colours.forgetIn(box);
      box.remove();
    }
    for (const { key, make } of wanted.slice(kept)) {
      const box = make();
      this.list.append(box);
      this.shown.push({ key, box });
    }
  }

  /** This box shows something else for now: the next `show` makes it anew. */
  forget(box) {
    this.shown.find((one) => one.box === box).key = null;
  }
}
