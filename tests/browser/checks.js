// What the browser tests ask of a page that only a browser can answer. Each is a function of the page as it stands.
({
  // Text whose contrast with what is behind it is below `least`: [text, ratio].
  lowContrast(least) {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (color) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = ([r, g, b]) => {
      const linear = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
      return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    };
    const behind = (el) => {
      if (el.matches("svg text.on")) return rgb(getComputedStyle(el.previousElementSibling).fill);
      for (let at = el; at; at = at.parentElement) {
        const color = rgb(getComputedStyle(at).backgroundColor);
        if (color[3] === 255) return color;
      }
      return [255, 255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const el = walker.currentNode.parentElement;
      const text = walker.currentNode.data.trim();
      if (!text || el.closest("script, style, .sr, [hidden], .sep, option") || !el.checkVisibility()) continue;
      const style = getComputedStyle(el);
      const front = rgb(el.closest("svg") ? style.fill : style.color);
      const [light, dark] = [luminance(front), luminance(behind(el))].sort((a, b) => b - a);
      const ratio = (light + 0.05) / (dark + 0.05);
      if (ratio < least) found.push([text.slice(0, 40), Math.round(ratio * 100) / 100]);
    }
    return found;
  },

  // What a person with a screen reader could not find, name or leave.
  hardToReach() {
    const found = [];
    const all = (selector) => [...document.querySelectorAll(selector)];
    const nameOf = (el) => {
      const by = (el.getAttribute("aria-labelledby") || "").split(/\s+/).filter(Boolean);
      const labels = el.labels ? [...el.labels].map((label) => label.textContent) : [];
      return (el.getAttribute("aria-label") || by.map((id) => document.getElementById(id)?.textContent).join(" ")
        || labels.join(" ") || el.textContent).trim();
    };
    const complain = (what, el) => found.push(`${what}: ${el.outerHTML.slice(0, 90)}`);
    if (!document.documentElement.lang) found.push("no language");
    if (all("main").length !== 1 || all("h1").length !== 1) found.push("not one main and one h1");
    for (const table of all("table")) if (!table.caption || !table.caption.textContent.trim()) complain("no caption", table);
    for (const th of all("th")) if (!th.scope) complain("no scope", th);
    for (const el of all("a, button, summary, select, input, [role=img], [role=region], [role=search], section, article")) {
      if (!nameOf(el)) complain("no name", el);
    }
    for (const el of all("select, input")) if (!el.labels.length) complain("no label", el);
    for (const el of all(".scroll")) if (el.tabIndex !== 0) complain("scrolls without the keyboard", el);
    const ids = all("[id]").map((el) => el.id);
    if (new Set(ids).size !== ids.length) found.push("an id twice");
    let before = 0;
    for (const el of all("h1, h2, h3, h4, h5, h6")) {
      const level = Number(el.tagName[1]);
      if (level > before + 1) complain("a heading level left out", el);
      before = level;
    }
    return found;
  },

  // What ends right of the window, other than inside what can be scrolled by itself.
  beyondTheWindow() {
    const inside = (el) => el.closest(".scroll, .sr") || el.getBoundingClientRect().right <= innerWidth + 1;
    return [...document.querySelectorAll("body *")].filter((el) => !inside(el)).map((el) => el.outerHTML.slice(0, 80));
  },

  // Elements that move, or change by degrees.
  moving() {
    const still = (style) => style.transitionDuration.split(", ").every((t) => t === "0s") && style.animationName === "none";
    const found = [...document.querySelectorAll("*")].filter((el) => !still(getComputedStyle(el)));
    return found.length + (getComputedStyle(document.documentElement).scrollBehavior === "smooth" ? 1 : 0);
  },
});
