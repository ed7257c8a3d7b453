(() => {
  const at = (id) => document.getElementById(id);
  const make = (name, text, more) => Object.assign(document.createElement(name), { textContent: text, ...more });
  if (!at("index")) return;
  const index = JSON.parse(at("index").textContent);
  const past = JSON.parse(at("past").textContent);
  const rows = [...document.querySelectorAll("details.case")];
  const texts = known(index);
  const matrix = [...document.querySelectorAll(".m tbody tr")].map((row) => [row, [...row.querySelectorAll("a")]]);
  const folds = [...document.querySelectorAll("#cases > details.fold")];
  const places = new Map(index.cases.map(([id], place) => [id, place]));
  let wish = read(index, location.hash);
  let here = null;

  // Details of most cases are packed: unpacked once, put in place when a case is opened. They were
  // escaped when they were made, and the policy of the page runs no script but this one.
  let unpacking = null;
  const unpack = () => unpacking ||= (async () => {
    const text = at("packed").textContent.trim();
    if (!text) return {};
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  })();

  const fill = async (row) => {
    if (row.dataset.filled) return;
    row.dataset.filled = "1";
    if (!row.querySelector(":scope > div")) {
      const body = row.appendChild(make("div", ""));
      try {
        body.innerHTML = (await unpack())[row.id] || "";
      } catch (error) {
        body.textContent = "This browser cannot unpack the details (" + error.message + "): they are in report.json.";
      }
    }
    for (const command of row.querySelectorAll("pre.command")) {
      const button = make("button", "Copy", { type: "button", className: "copy" });
      button.setAttribute("aria-label", "Copy " + command.textContent);
      button.addEventListener("click", () => copy(command, button));
      command.before(button);
    }
    spark(row);
  };

  const copy = async (command, button) => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch (error) {
      getSelection().selectAllChildren(command);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
  };

  // What to do next with a case: the first of its commands.
  const copyFirst = async (row) => {
    await fill(row);
    const command = row.querySelector("pre.command");
    if (command) copy(command, row.querySelector(".copy"));
  };

  const strip = (row, place) => {
    const own = past.cases[place];
    if (!own) return;
    const told = make("span", "", { className: "strip", title: "the last runs, the newest last" });
    told.setAttribute("role", "img");
    told.setAttribute("aria-label", "the last runs, the newest last: " + [...own[0]].map((letter) => past.letters[letter]).join(", "));
    for (const letter of own[0]) {
      const outcome = past.letters[letter];
      told.append(letter === "p" ? past.symbols[letter] : make("b", past.symbols[letter], { className: outcome }));
    }
    row.firstElementChild.append(told);
  };

  const line = (values, name, unit) => {
    const held = values.map((value, place) => [place, value]).filter(([, value]) => value !== null);
    if (!held.length) return null;
    const only = held.map(([, value]) => value);
    const [low, high] = [Math.min(...only), Math.max(...only)];
    const room = Math.max(high - low, high * 0.04, 1e-9);
    const points = held.map(([place, value]) => [(100 * place) / Math.max(1, values.length - 1), 27 - (24 * (value - (high + low) / 2 + room / 2)) / room]);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 30");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("class", "spark");
    svg.setAttribute("role", "img");
    const last = only[only.length - 1];
    const words = name + " " + last.toPrecision(4) + " " + unit + ", " + low.toPrecision(4) + " to " + high.toPrecision(4) + " in " + held.length + (held.length === 1 ? " run" : " runs");
    svg.setAttribute("aria-label", words);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", "M" + points.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L"));
    svg.append(path);
    const box = make("div", "");
    box.append(svg, words);
    return box;
  };

  const spark = (row) => {
    const own = past.cases[places.get(row.id)];
    if (!own) return;
    const lines = [line(own[1].map((v) => v === null ? v : v / 1000), "step", "ms"), line(own[2].map((v) => v === null ? v : v / 1024), "peak", "MiB")].filter(Boolean);
    if (!lines.length) return;
    const box = make("div", "", { className: "sparks" });
    box.append(...lines);
    row.lastElementChild.append(make("h4", "Step time and memory over the last runs"), box);
  };

  const show = () => {
    let chosen;
    at("wrong").textContent = "";
    try {
      chosen = choose(index, texts, wish);
    } catch (error) {
      at("wrong").textContent = error.message;
      return;
    }
    rows.forEach((row, place) => { row.hidden = !chosen.shown[place]; });
    const seen = new Set(index.cases.filter((_, place) => chosen.shown[place]).map(([id]) => id));
    const asked = seen.size !== rows.length;
    for (const fold of folds) {
      if (asked && fold.querySelector("details.case:not([hidden])")) fold.open = true;
      fold.hidden = !fold.querySelector("details.case:not([hidden])");
    }
    for (const [row, cells] of matrix) row.hidden = !cells.some((cell) => seen.has(decodeURIComponent(cell.hash.slice(1))));
    chips.forEach((chip, place) => {
      chip.textContent = past.marks[place] + " " + chosen.counts[place] + " " + index.outcomes[place];
      chip.setAttribute("aria-pressed", String(wish.outcomes.includes(place)));
    });
    at("told").textContent = (seen.size === rows.length ? "" : seen.size + " of ") + rows.length + (rows.length === 1 ? " case" : " cases");
  };

  const wanted = () => {
    show();
    const text = written(index, wish);
    history.replaceState(null, "", text || location.pathname + location.search);
  };

  const draw = () => {
    at("words").value = wish.words;
    selects.forEach((select, axis) => { if (select) select.value = axis in wish.axes ? String(wish.axes[axis]) : ""; });
    show();
  };

  const go = async (row, open) => {
    if (here) here.classList.remove("here");
    here = row;
    row.classList.add("here");
    if (open) {
      row.hidden = false;
      const fold = row.parentElement.closest("details");
      if (fold) Object.assign(fold, { hidden: false, open: true });
      row.open = true;
      await fill(row);
    }
    row.scrollIntoView({ block: open ? "start" : "nearest" });
    row.firstElementChild.focus({ preventScroll: true });
  };

  const follow = () => {
    const name = decodeURIComponent(location.hash.slice(1));
    if (location.hash.startsWith("#?") || !name) {
      wish = read(index, location.hash);
      draw();
    } else if (places.has(name)) {
      go(rows[places.get(name)], true);
    }
  };

  const step = (by) => {
    const visible = rows.filter((row) => !row.hidden && (row.parentElement.open !== false));
    if (!visible.length) return;
    const next = visible.indexOf(here) + by;
    go(visible[here === null || !visible.includes(here) ? 0 : Math.max(0, Math.min(visible.length - 1, next))], false);
  };

  const chips = index.outcomes.map((outcome, place) => {
    const chip = make("button", outcome, { type: "button", className: outcome });
    chip.addEventListener("click", () => {
      wish.outcomes = wish.outcomes.includes(place) ? wish.outcomes.filter((other) => other !== place) : [...wish.outcomes, place];
      wanted();
    });
    return at("chips").appendChild(chip);
  });
  const selects = index.axes.map(([name, values], axis) => {
    if (values.length < 2) return null;
    const select = make("select", "");
    select.setAttribute("aria-label", name);
    select.append(make("option", name + ": any", { value: "" }), ...values.map((value, place) => make("option", name + ": " + value, { value: String(place) })));
    select.addEventListener("change", () => {
      if (select.value === "") delete wish.axes[axis];
      else wish.axes[axis] = Number(select.value);
      wanted();
    });
    at("axes").append(select, " ");
    return select;
  });
  at("words").addEventListener("input", (event) => {
    wish.words = event.target.value;
    wanted();
  });
  rows.forEach((row, place) => {
    strip(row, place);
    row.addEventListener("toggle", () => { if (row.open) fill(row); });
    if (row.open) fill(row);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape") {
      wish = read(index, "");
      wanted();
      draw();
      if (typing) event.target.blur();
    } else if (!typing && event.key === "/") {
      event.preventDefault();
      at("words").focus();
    } else if (!typing && (event.key === "j" || event.key === "k")) {
      step(event.key === "j" ? 1 : -1);
    } else if (!typing && event.key === "c" && here) {
      copyFirst(here);
    }
  });
  // Paper has no clicks: what failed is printed in full, as far as anyone reads.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = rows.filter((row) => !row.open && !row.hidden && row.querySelector(":scope > div") && !row.matches(".passed, .skipped")).slice(0, 50);
    opened.forEach((row) => { row.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((row) => { row.open = false; }));
  addEventListener("hashchange", follow);
  at("tools").hidden = false;
  draw();
  follow();
})();
