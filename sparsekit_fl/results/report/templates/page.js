"use strict";
(() => {
  // A click on a head sorts; numbers fall at first, since most readers look for the largest, and rows without one stay last.
  for (const head of document.querySelectorAll("th[aria-sort]")) {
    const sort = () => {
      const table = head.closest("table");
      const place = [...head.parentNode.children].indexOf(head);
      const words = head.dataset.words !== undefined;
      const first = words ? "ascending" : "descending";
      const other = words ? "descending" : "ascending";
      const way = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of head.parentNode.children) if (each.hasAttribute("aria-sort")) each.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", way);
      const sign = way === "ascending" ? 1 : -1;
      const value = (row) => row.children[place].dataset.value ?? "";
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (words ? x.localeCompare(y) : Number(x) - Number(y));
      });
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  }

  // The numbers lie beside the page, so the link is relative to it.
  for (const link of document.querySelectorAll("a[data-file]")) link.href = link.dataset.file;

  // A shadow says that a table goes on beyond the edge.
  for (const box of document.querySelectorAll(".scroll")) {
    const edge = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
    box.addEventListener("scroll", edge, { passive: true });
    addEventListener("resize", edge);
    edge();
  }
})();
