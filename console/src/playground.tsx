import type { JSX } from "preact";
import { Empty, Page } from "./ui";
export function Playground(): JSX.Element {
  return (
    <Page title="Playground">
      <Empty title="Nothing yet" />
    </Page>
  );
}
