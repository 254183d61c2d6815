// What the page can do beyond being read: show some cells only, and copy commands. Nothing needs it.
"use strict";
(() => {
  const bar = document.getElementById("filter");
  const cells = new Map();
  for (const el of document.querySelectorAll("article.cell")) cells.set(el.dataset.n, { el, words: null });

  // ---- filters

  const fields = bar ? [...bar.querySelectorAll("[name]:not(button)")] : [];
  const status = bar && bar.querySelector(".shown");

  const wordsOf = (cell) => {
    if (cell.words === null) {
      // A twin's command names scenarios that it is not about, so commands are left out.
      const about = [...cell.el.closest("section.scenario").children].filter((el) => el.tagName !== "ARTICLE");
      const own = [...cell.el.children].filter((el) => !el.classList.contains("rerun"));
      cell.words = [...about, ...own].map((el) => el.textContent).join(" ").toLowerCase();
    }
    return cell.words;
  };

  const isWanted = (cell, wanted) => {
    const data = cell.el.dataset;
    return (
      (!wanted.result || data.result === wanted.result) &&
      (!wanted.policy || data.policy === wanted.policy) &&
      (!wanted.fault || data.fault.split(" ").includes(wanted.fault)) &&
      wanted.text.every((word) => wordsOf(cell).includes(word))
    );
  };

  const apply = () => {
    const wanted = Object.fromEntries(fields.map((field) => [field.name, field.value]));
    wanted.text = wanted.text.toLowerCase().split(/\s+/).filter(Boolean);
    const active = fields.some((field) => field.value.trim());
    let shown = 0;
    for (const cell of cells.values()) {
      const keep = !active || isWanted(cell, wanted);
      cell.el.hidden = !keep;
      shown += keep;
    }
    const isShown = (numbers) => !active || numbers.split(" ").some((n) => n && !cells.get(n).el.hidden);
    for (const el of document.querySelectorAll("[data-cells]")) {
      const keep = isShown(el.dataset.cells);
      if (el.tagName === "TD") el.classList.toggle("out", !keep);
      else el.hidden = !keep;
    }
    for (const row of document.querySelectorAll(".matrix tbody tr:not(.group)")) {
      row.hidden = active && !row.querySelector("td:not(.out)");
    }
    const hideEmpty = (selector, inner) => {
      for (const el of document.querySelectorAll(selector)) el.hidden = active && !el.querySelector(inner);
    };
    hideEmpty(".matrix tbody", "tr:not(.group):not([hidden])");
    hideEmpty("section.scenario", "article:not([hidden])");
    hideEmpty("section.cells", "section.scenario:not([hidden])");
    hideEmpty("section.tables", ".matrix tbody:not([hidden])");
    bar.classList.toggle("active", active);
    const all = `${cells.size} cell${cells.size === 1 ? "" : "s"}`;
    status.textContent = !active ? all : shown ? `${shown} of ${all}` : `none of ${all}`;
  };

  // The hash is either a place in the page or the filters, as in #result=fail&text=torn.
  const toHash = () => {
    const set = fields.filter((field) => field.value.trim()).map((field) => [field.name, field.value.trim()]);
    const hash = new URLSearchParams(set).toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  };

  const fromHash = () => {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) {
      reveal(document.getElementById(decodeURIComponent(hash)));
      return;
    }
    const set = new URLSearchParams(hash);
    for (const field of fields) {
      field.value = set.get(field.name) || "";
      if (field.value !== (set.get(field.name) || "")) field.value = "";
    }
    apply();
  };

  // A link may lead to a cell that the filters hide: then all cells are shown.
  const reveal = (target) => {
    if (!target || !target.closest("[hidden], .out")) return;
    for (const field of fields) field.value = "";
    apply();
    target.scrollIntoView();
  };

  if (bar) {
    const changed = () => {
      apply();
      toHash();
    };
    bar.hidden = false;
    document.documentElement.classList.add("filtering");
    bar.addEventListener("input", changed);
    bar.querySelector("[name=clear]").addEventListener("click", () => {
      for (const field of fields) field.value = "";
      changed();
      fields[fields.length - 1].focus();
    });
    window.addEventListener("hashchange", fromHash);
    apply();
    fromHash();
  }

  // ---- copying

  const copy = async (text, code) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      getSelection().selectAllChildren(code);
      return document.execCommand("copy");
    }
  };

  for (const line of document.querySelectorAll(".rerun")) {
    const code = line.querySelector("code");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy the rerun command");
    const said = document.createElement("span");
    said.setAttribute("role", "status");
    said.className = "said";
    button.addEventListener("click", async () => {
      said.textContent = (await copy(code.textContent, code)) ? "copied" : "selected: copy it by hand";
      setTimeout(() => (said.textContent = ""), 2500);
    });
    line.append(button, said);
  }
})();
