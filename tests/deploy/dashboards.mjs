// Holds dashboards against the types that Grafana publishes of its own model: node dashboards.mjs FILE...
//
// Each dashboard becomes the value of a constant of that type. A key that Grafana does not know, a value of another kind and a
// key that is missing are errors then, each with its place in the JSON.

import { readFileSync } from "node:fs";
import path from "node:path";
import ts from "typescript";

const OPTIONS = {
  strict: true,
  noEmit: true,
  skipLibCheck: true,
  types: [],
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
};

/** What the model leaves open, panel by panel. Prometheus publishes no types: its queries are held against a table of ours. */
const HEAD = `
import type { Dashboard, Panel, RowPanel, AnnotationQuery } from "@grafana/schema";
import type { GraphFieldConfig, TableFieldOptions } from "@grafana/schema";
import type { Options as Stat } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type { Options as Table } from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type { Options as Timeseries } from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has the values of an enumeration, not its names.
type Plain<T> = unknown extends T ? T
  : T extends string ? \`\${T}\`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer Item)[] ? Plain<Item>[]
  : { [Key in keyof T]: Plain<T[Key]> };

type Source = { type: "prometheus"; uid: string };
type Query = {
  refId: string; datasource: Source; editorMode: "code"; expr: string; legendFormat: string; range: boolean; instant: boolean;
  format: "table" | "time_series";
};
type Fields<Custom> = Plain<Omit<NonNullable<Panel["fieldConfig"]>, "defaults">> & {
  defaults: Plain<Omit<NonNullable<Panel["fieldConfig"]>["defaults"], "custom">> & { custom?: Plain<Partial<Custom>> };
};
// What has a default may be missing.
type Shown<Kind, Options, Custom> = Plain<Omit<Panel, "type" | "options" | "targets" | "fieldConfig" | "datasource">> & {
  type: Kind; options: Plain<Partial<Options>>; targets: Query[]; fieldConfig: Fields<Custom>; datasource: Source;
};
type Shows = Shown<"stat", Stat, {}> | Shown<"table", Table, TableFieldOptions> | Shown<"timeseries", Timeseries, GraphFieldConfig>;
// Of the plug-in for Prometheus, whose keys are beside the model's.
type Mark = Plain<AnnotationQuery> & { expr: string; step: string; titleFormat: string; textFormat: string; useValueForTime: boolean };
// What its editor keeps beside the query.
type Variable = Plain<NonNullable<NonNullable<Dashboard["templating"]>["list"]>[number]> & { definition?: string };
type Whole = Plain<Omit<Dashboard, "panels" | "annotations" | "templating">> & {
  panels: (Shows | Plain<RowPanel>)[]; annotations: { list: Mark[] }; templating: { list: Variable[] };
};
`;

/** What is wrong with a dashboard, as lines. */
export function faults(name, json) {
  const file = path.resolve(import.meta.dirname, "checked.ts");
  const text = `${HEAD}\nexport const dashboard: Whole =\n${json};\n`;
  const begin = HEAD.split("\n").length + 1;
  const host = ts.createCompilerHost(OPTIONS);
  const { fileExists, readFile, getSourceFile } = host;
  host.fileExists = (path) => path === file || fileExists(path);
  host.readFile = (path) => (path === file ? text : readFile(path));
  host.getSourceFile = (path, version) => (
    path === file ? ts.createSourceFile(path, text, version) : getSourceFile.call(host, path, version)
  );
  const program = ts.createProgram([file], OPTIONS, host);
  return ts.getPreEmitDiagnostics(program).map((found) => {
    const line = found.file?.getLineAndCharacterOfPosition(found.start ?? 0).line ?? 0;
    return `${name}:${line - begin + 1}: ${ts.flattenDiagnosticMessageText(found.messageText, "\n  ")}`;
  });
}

const files = process.argv.slice(2).map((file) => [path.basename(file), readFileSync(file, "utf8")]);
const found = files.flatMap(([name, json]) => faults(name, json));
for (const fault of found) console.error(fault);
// A check that finds nothing wrong anywhere is none.
const [[name, json]] = files;
for (const [right, wrong] of [['"fieldConfig"', '"fieldconfig"'], ['"absolute"', '"relative"'], ['"showLegend": true', '"showLegend": 1']]) {
  if (!json.includes(right)) throw new Error(`${name} has no ${right}`);
  if (faults(name, json.replace(right, wrong)).length === 0) throw new Error(`${wrong} is not seen to be wrong`);
}
if (found.length > 0) process.exit(1);
console.log(`${files.length} dashboards are as Grafana's model has them`);
