package httpapi_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"flashsale.dev/operator/test/testmysql"
)

// listener reads a stream of events.
type listener struct {
	t    testing.TB
	body io.ReadCloser
	in   *bufio.Scanner
}

func listen(t testing.TB, server *httptest.Server) *listener {
	t.Helper()
	response, err := server.Client().Get(server.URL + "/v1/events")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "text/event-stream" || response.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("status %d, %v", response.StatusCode, response.Header)
	}
	return &listener{t, response.Body, bufio.NewScanner(response.Body)}
}

// next is the next event's stock; nil at the end of the stream.
func (l *listener) next() (stock map[string]any) {
	l.t.Helper()
	for l.in.Scan() {
		if data, ok := strings.CutPrefix(l.in.Text(), "data: "); ok {
			if err := json.Unmarshal([]byte(data), &stock); err != nil {
				l.t.Fatalf("an event's data is %q: %v", data, err)
			}
			return stock
		}
	}
	return nil
}

// until reads on to the phase.
func (l *listener) until(phase string) map[string]any {
	l.t.Helper()
	for {
		stock := l.next()
		if stock == nil {
			l.t.Fatalf("the stream ended before %q: %v", phase, l.in.Err())
		}
		if stock["phase"] == phase {
			return stock
		}
	}
}

// A stream outlives the limits that the server sets to requests, and tells of each phase.
func TestEventsTellOfASalesWholeLife(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).Window(2*time.Second, time.Hour).In(t, store)
	running, api := podWith(t, store, sale, config(t))
	server := httptest.NewUnstartedServer(api.Handler())
	server.Config.ReadTimeout, server.Config.WriteTimeout = 100*time.Millisecond, 100*time.Millisecond
	server.Start()
	t.Cleanup(server.Close)

	l := listen(t, server)
	if first := l.next(); first["phase"] != "not-open" || first["opensIn"].(float64) <= 0 || first["available"] != 1.0 {
		t.Errorf("before the start: %v", first)
	}
	if open := l.until("open"); open["opensIn"] != nil {
		t.Errorf("after the start: %v", open)
	}
	held := call(t, running, "POST", "/v1/reservations", "ann", "")
	wantKind(t, held, "201 HELD")
	if all := l.until("all-held"); all["held"] != 1.0 || all["nextExpiry"] == nil {
		t.Errorf("all held: %v", all)
	}
	path := held.header.Get("Location")
	wantKind(t, call(t, running, "DELETE", path, "ann", ""), "200 RELEASED")
	l.until("open")
	held = call(t, running, "POST", "/v1/reservations", "bob", "")
	wantKind(t, held, "201 HELD")
	wantKind(t, call(t, running, "POST", held.header.Get("Location")+"/confirm", "", `{"paymentId":"pay-1"}`), "200 CONFIRMED")
	if end := l.until("sold-out"); end["sold"] != 1.0 || end["nextExpiry"] != nil {
		t.Errorf("sold out: %v", end)
	}
	sale.EndsAt, sale.Generation = sale.StartsAt.Add(time.Millisecond), 2
	if err := store.Register(t.Context(), sale); err != nil {
		t.Fatal(err)
	}
	l.until("closed")

	api.BeginShutdown()
	if stock := l.next(); stock != nil {
		t.Errorf("a pod that shuts down told %v, and did not end the stream", stock)
	}
	wantKind(t, call(t, running, "GET", "/v1/events", "", ""), "503 busy")
}

// Listeners are told from memory: with the database gone, new ones still hear what was known last.
func TestEventsNeedNoDatabase(t *testing.T) {
	dsn := testmysql.DSN(t)
	store, own := testmysql.Open(t, dsn), testmysql.Open(t, dsn)
	if _, err := store.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	server := pod(t, own, testmysql.Sale(3).In(t, store))
	if err := own.Close(); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 100 {
		l := listen(t, server)
		wg.Go(func() {
			if stock := l.next(); stock["phase"] != "open" || stock["available"] != 3.0 {
				t.Errorf("told %v", stock)
			}
		})
	}
	wg.Wait()
}

// Every problem has its page, and no page is of a problem that is not answered.
func TestProblemsHaveAPage(t *testing.T) {
	store := testmysql.Store(t)
	server := pod(t, store, testmysql.Sale(1).In(t, store))
	var slugs []string
	sources, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(source, "_test.go") {
			continue
		}
		for _, m := range regexp.MustCompile(`(?:Slug: |conflict\()"([a-z-]+)"`).FindAllSubmatch(text, -1) {
			slugs = append(slugs, string(m[1]))
		}
	}
	slices.Sort(slugs)
	slugs = slices.Compact(slugs)
	pages, err := filepath.Glob("problems/*.md")
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) != len(slugs) {
		t.Errorf("%d pages for %d problems", len(pages), len(slugs))
	}
	for _, slug := range slugs {
		response, err := server.Client().Get(server.URL + "/problems/" + slug)
		if err != nil {
			t.Fatal(err)
		}
		page, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK || !strings.HasPrefix(string(page), fmt.Sprintf("# %s\n\n", slug)) {
			t.Errorf("the page of %s: status %d, %.40q, %v", slug, response.StatusCode, page, err)
		}
	}
	wantKind(t, call(t, server, "GET", "/problems/none", "", ""), "404 not-found")
	wantKind(t, call(t, server, "GET", "/problems/..%2f..%2fhttpapi", "", ""), "404 not-found")
}
