package httpapi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/httpapi"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/reserver/keys"
	"flashsale.dev/operator/test/testmysql"
)

// theKeys are those of all pods in these tests.
var theKeys = keys.New(1)

// config believes whoever connects from this machine, and sets no limits.
func config(t testing.TB) httpapi.Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), keys.FileName)
	if err := os.WriteFile(path, theKeys.Encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := keys.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return httpapi.Config{Pod: "pod-" + uuid.NewString()[:8], MaxInFlight: 20_000,
		Identity: admission.Identity{Header: "X-Buyer-Id", Proxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, Keys: file}}
}

// pod serves a sale over HTTP until the test ends.
func pod(t testing.TB, store *inventory.Store, sale inventory.Sale) *httptest.Server {
	t.Helper()
	server, _ := podWith(t, store, sale, config(t))
	return server
}

func podWith(t testing.TB, store *inventory.Store, sale inventory.Sale, c httpapi.Config) (*httptest.Server, *httpapi.Server) {
	t.Helper()
	server, api, _ := podWithMetrics(t, store, sale, c)
	return server, api
}

func podWithMetrics(t testing.TB, store *inventory.Store, sale inventory.Sale, c httpapi.Config) (*httptest.Server, *httpapi.Server, *prometheus.Registry) {
	t.Helper()
	registry := prometheus.NewRegistry()
	api := httpapi.New(store, sale.ID, c, registry, slog.New(slog.NewTextHandler(io.Discard, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { api.Run(ctx) })
	server := httptest.NewServer(api.Handler())
	server.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = 256
	t.Cleanup(func() { server.Close(); cancel(); wg.Wait() })
	testmysql.Eventually(t, "the pod is ready", func() bool { return api.Ready() == nil })
	return server, api, registry
}

type response struct {
	status int
	header http.Header
	body   map[string]any
}

// kind is "201 HELD", or "409 sold-out".
func (r response) kind() string {
	if problem, ok := r.body["type"].(string); ok {
		return fmt.Sprintf("%d %s", r.status, strings.TrimPrefix(problem, "https://flashsale.dev/problems/"))
	}
	return fmt.Sprintf("%d %v", r.status, r.body["state"])
}

// call makes a call of a buyer, or, without one, of the checkout.
func call(t testing.TB, server *httptest.Server, method, path, buyer, body string) response {
	t.Helper()
	return callWithKey(t, server, method, path, buyer, "", body)
}

func callWithKey(t testing.TB, server *httptest.Server, method, path, buyer, key, body string) response {
	t.Helper()
	request, err := http.NewRequest(method, server.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if buyer != "" {
		request.Header.Set("X-Buyer-Id", buyer)
	} else {
		request.Header.Set("Authorization", "Bearer "+theKeys.Current.CheckoutToken)
	}
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	answer, err := server.Client().Do(request)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer func() { _ = answer.Body.Close() }()
	r := response{status: answer.StatusCode, header: answer.Header}
	if err := json.NewDecoder(answer.Body).Decode(&r.body); err != nil {
		t.Fatalf("%s %s: status %d, the body is not JSON: %v", method, path, answer.StatusCode, err)
	}
	if want := map[bool]string{true: "application/problem+json", false: "application/json"}[r.status >= 400]; answer.Header.Get("Content-Type") != want {
		t.Errorf("%s %s: %d with content type %q", method, path, r.status, answer.Header.Get("Content-Type"))
	}
	return r
}

func wantKind(t testing.TB, got response, want string) {
	t.Helper()
	if got.kind() != want {
		t.Fatalf("answer %s, want %s (%v)", got.kind(), want, got.body)
	}
}

func TestAReservationFromHoldToSale(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).In(t, store)
	a, b := pod(t, store, sale), pod(t, store, sale)

	held := call(t, a, "POST", "/v1/reservations", "ann", `{"quantity":1}`)
	wantKind(t, held, "201 HELD")
	path := held.header.Get("Location")
	if path != "/v1/reservations/"+held.body["id"].(string) {
		t.Errorf("Location %q", path)
	}
	again := call(t, b, "POST", "/reserve", "ann", "") // another tab, another pod, the alias, no body
	wantKind(t, again, "200 HELD")
	if again.body["id"] != held.body["id"] {
		t.Error("the second tab got another reservation")
	}
	wantKind(t, call(t, b, "GET", path, "ann", ""), "200 HELD")
	wantKind(t, call(t, b, "GET", path, "", ""), "200 HELD") // the checkout
	wantKind(t, call(t, b, "GET", path, "bob", ""), "404 reservation-not-found")
	wantKind(t, call(t, b, "DELETE", path, "bob", ""), "404 reservation-not-found")
	wantKind(t, call(t, b, "POST", path+"/confirm", "", `{"paymentId":"pay-1","paidAt":"2026-12-01T04:31:00+01:00"}`), "200 CONFIRMED")
	wantKind(t, call(t, a, "POST", path+"/confirm", "", `{"paymentId":"pay-1"}`), "200 CONFIRMED")
	wantKind(t, call(t, a, "POST", path+"/confirm", "", `{"paymentId":"pay-2"}`), "409 payment-mismatch")
	wantKind(t, call(t, a, "DELETE", path, "ann", ""), "409 confirmed")
	wantKind(t, call(t, a, "POST", "/v1/reservations", "ann", ""), "409 limit")

	bob := call(t, a, "POST", "/v1/reservations", "bob", "")
	wantKind(t, bob, "201 HELD")
	wantKind(t, call(t, b, "POST", bob.header.Get("Location")+"/confirm", "", `{"paymentId":"pay-1"}`), "409 payment-reused")
	testmysql.Eventually(t, "both pods know that all is held", func() bool {
		return call(t, a, "GET", "/v1/stock", "", "").body["phase"] == "all-held" && call(t, b, "GET", "/stock", "", "").body["phase"] == "all-held"
	})
	refused := call(t, b, "POST", "/v1/reservations", "cat", "")
	wantKind(t, refused, "409 all-held")
	if refused.header.Get("Retry-After") == "" || refused.body["nextExpiry"] == nil || refused.body["held"] != 1.0 {
		t.Errorf("the refusal does not say when to come back: %v %v", refused.header, refused.body)
	}
	wantKind(t, call(t, b, "POST", "/v1/reservations", "bob", ""), "200 HELD") // memory knows the shelf is empty, and bob has his
	wantKind(t, call(t, b, "POST", "/v1/reservations", "ann", ""), "409 limit")

	wantKind(t, call(t, a, "DELETE", bob.header.Get("Location"), "bob", ""), "200 RELEASED")
	wantKind(t, call(t, b, "DELETE", bob.header.Get("Location"), "bob", ""), "200 RELEASED")
	var cat response
	testmysql.Eventually(t, "the released unit goes to somebody else", func() bool {
		cat = call(t, b, "POST", "/v1/reservations", "cat", "")
		return cat.status == http.StatusCreated
	})
	wantKind(t, call(t, b, "POST", cat.header.Get("Location")+"/confirm", "", `{"paymentId":"pay-4"}`), "200 CONFIRMED")
	testmysql.Eventually(t, "the stock says sold out", func() bool { return call(t, a, "GET", "/v1/stock", "", "").body["phase"] == "sold-out" })
	wantKind(t, call(t, a, "POST", "/v1/reservations", "dan", ""), "409 sold-out")
	stock := call(t, a, "GET", "/v1/stock", "", "")
	if stock.header.Get("Cache-Control") != "max-age=1" || stock.body["sold"] != 2.0 || stock.body["available"] != 0.0 {
		t.Errorf("stock %v %v", stock.header, stock.body)
	}
}

// A key gives the same reservation whatever became of it, from memory's and from the database's answer.
func TestIdempotencyKeyOverHTTP(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).MaxPerBuyer(2).In(t, store)
	a, b := pod(t, store, sale), pod(t, store, sale)
	reserve := func(server *httptest.Server, buyer, key, body string) response {
		return callWithKey(t, server, "POST", "/v1/reservations", buyer, key, body)
	}
	first := reserve(a, "ann", "k1", `{"quantity":2}`)
	wantKind(t, first, "201 HELD")
	wantKind(t, reserve(b, "ann", "k1", `{"quantity":1}`), "422 key-reused")
	wantKind(t, reserve(b, "ann", "k 1", `{"quantity":1}`), "422 invalid")
	testmysql.Eventually(t, "memory knows that all is held", func() bool { return call(t, b, "GET", "/stock", "", "").body["phase"] == "all-held" })
	wantKind(t, reserve(b, "ann", "k1", `{"quantity":2}`), "200 HELD")
	wantKind(t, reserve(b, "ann", "k1", ""), "422 key-reused")
	wantKind(t, reserve(b, "ann", "k2", ""), "200 HELD") // another key of the same buyer: the same live reservation
	wantKind(t, reserve(b, "bob", "k1", ""), "409 all-held")

	wantKind(t, call(t, a, "DELETE", first.header.Get("Location"), "ann", ""), "200 RELEASED")
	for key, body := range map[string]string{"k1": `{"quantity":2}`, "k2": ""} {
		var again response
		testmysql.Eventually(t, "the key's answer is the reservation as it is now", func() bool {
			again = reserve(b, "ann", key, body)
			return again.kind() == "200 RELEASED"
		})
		if again.body["id"] != first.body["id"] {
			t.Errorf("key %s gave reservation %v, want %v", key, again.body["id"], first.body["id"])
		}
	}
	var fresh response
	testmysql.Eventually(t, "a key of a refused request can still win", func() bool {
		fresh = reserve(b, "bob", "k1", "")
		return fresh.kind() == "201 HELD"
	})
}

// A payment that comes late is answered with a 2xx, and a refund gives the units back once.
func TestLatePaymentsAndRefundsOverHTTP(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	server := pod(t, store, sale)
	hold := func(buyer string) (path string) {
		var held response
		testmysql.Eventually(t, buyer+" gets the unit", func() bool {
			held = call(t, server, "POST", "/v1/reservations", buyer, "")
			return held.kind() == "201 HELD"
		})
		return held.header.Get("Location")
	}
	ann := hold("ann")
	wantKind(t, call(t, server, "POST", ann+"/refund", "", ""), "409 not-confirmed")
	wantKind(t, call(t, server, "DELETE", ann, "ann", ""), "200 RELEASED")
	bob := hold("bob")
	due := call(t, server, "POST", ann+"/confirm", "", `{"paymentId":"pay-ann"}`)
	wantKind(t, due, "200 REFUND_DUE")
	if due.body["reason"] != inventory.DueSoldOut || due.body["paymentId"] != "pay-ann" {
		t.Errorf("the refund due does not say why: %v", due.body)
	}
	wantKind(t, call(t, server, "POST", ann+"/refund", "", ""), "200 REFUND_DUE")
	wantKind(t, call(t, server, "POST", bob+"/confirm", "", `{"paymentId":"pay-bob"}`), "200 CONFIRMED")
	for range 2 {
		refunded := call(t, server, "POST", bob+"/refund", "", `{"restock":true}`)
		wantKind(t, refunded, "200 REFUNDED")
		if refunded.body["restocked"] != true {
			t.Errorf("the answer does not say that the unit is back: %v", refunded.body)
		}
	}
	cat := hold("cat")
	wantKind(t, call(t, server, "POST", cat+"/confirm", "", `{"paymentId":"pay-cat"}`), "200 CONFIRMED")
	kept := call(t, server, "POST", cat+"/refund", "", `{"restock":false}`)
	wantKind(t, kept, "200 REFUNDED")
	if kept.body["restocked"] != false {
		t.Errorf("the answer does not say that the unit stays sold: %v", kept.body)
	}
	if report := testmysql.Audit(t, store, sale.ID); report.Sold != 1 || report.Available != 0 {
		t.Errorf("counts %+v", report.Counts)
	}
}

func TestWindowOverHTTP(t *testing.T) {
	store := testmysql.Store(t)
	early := pod(t, store, testmysql.Sale(1).Window(time.Hour, 2*time.Hour).In(t, store))
	refused := call(t, early, "POST", "/v1/reservations", "ann", "")
	wantKind(t, refused, "403 not-open")
	if refused.body["opensAt"] == nil || len(refused.header.Get("Retry-After")) != 4 { // 3,600 s or a little less
		t.Errorf("not told when to come: %v %v", refused.header, refused.body)
	}
	late := pod(t, store, testmysql.Sale(1).Window(-time.Hour, -time.Minute).In(t, store))
	wantKind(t, call(t, late, "POST", "/v1/reservations", "ann", ""), "410 closed")
}

// A negative quantity lowered the total and raised the stock.
func TestCase061(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).MaxPerBuyer(3).In(t, store)
	server := pod(t, store, sale)
	for _, quantity := range []string{"-1", "0", "-0", "0.5", "1.0", "1e0", `"1"`, "1e9", "1001", "2147483648", "9223372036854775808", "1e400", "null", "true", "[1]", "{}", `""`, "+1", "01", "NaN"} {
		got := call(t, server, "POST", "/v1/reservations", "ann", `{"quantity":`+quantity+`}`)
		if got.kind() != "422 invalid" {
			t.Errorf("quantity %s: %s", quantity, got.kind())
		}
	}
	for name, body := range map[string]string{
		"unknown field": `{"quantity":1,"buyer":"bob"}`, "two objects": `{"quantity":1}{"quantity":1}`, "no object": `1`, "array": `[{"quantity":1}]`, "null": `null`,
		"not JSON": `quantity=1`, "cut off": `{"quantity":1`, "bytes": "\x00\xff",
	} {
		if got := call(t, server, "POST", "/v1/reservations", "ann", body); got.kind() != "422 invalid" {
			t.Errorf("%s: %s", name, got.kind())
		}
	}
	if report := testmysql.Audit(t, store, sale.ID); report.Available != 3 {
		t.Errorf("units moved: %+v", report.Counts)
	}
	wantKind(t, call(t, server, "POST", "/v1/reservations", "ann", `{}`), "201 HELD") // missing means 1
}

func TestBadRequests(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	server := pod(t, store, sale)
	unknown := "/v1/reservations/" + uuid.NewString()
	long := strings.Repeat("x", 129)
	for _, tt := range []struct{ name, method, path, buyer, body, want string }{
		{"no buyer", "POST", "/v1/reservations", "", "", "401 unauthenticated"},
		{"buyer too long", "POST", "/v1/reservations", long, "", "401 unauthenticated"},
		{"buyer with a space", "POST", "/v1/reservations", "a b", "", "401 unauthenticated"},
		{"body of 64 KiB and more", "POST", "/v1/reservations", "ann", `{"quantity":1` + strings.Repeat(" ", 64<<10) + `}`, "413 too-large"},
		{"unknown reservation", "GET", unknown, "ann", "", "404 reservation-not-found"},
		{"unknown reservation, checkout", "GET", unknown, "", "", "404 reservation-not-found"},
		{"releasing an unknown one", "DELETE", unknown, "", "", "404 reservation-not-found"},
		{"confirming an unknown one", "POST", unknown + "/confirm", "", `{"paymentId":"p"}`, "200 REFUND_DUE"},
		{"refunding an unknown one", "POST", "/v1/reservations/" + uuid.NewString() + "/refund", "", "", "404 reservation-not-found"},
		{"refunding as a buyer", "POST", unknown + "/refund", "ann", "", "403 checkout-only"},
		{"refunding with a word for restock", "POST", unknown + "/refund", "", `{"restock":"yes"}`, "422 invalid"},
		{"an id that is none", "GET", "/v1/reservations/1", "", "", "404 reservation-not-found"},
		{"an id in another form", "GET", "/v1/reservations/urn:uuid:" + uuid.NewString(), "", "", "404 reservation-not-found"},
		{"an id with SQL", "GET", "/v1/reservations/'%20OR%201=1--", "", "", "404 reservation-not-found"},
		{"confirming without a payment", "POST", unknown + "/confirm", "", `{}`, "422 invalid"},
		{"payment id too long", "POST", unknown + "/confirm", "", `{"paymentId":"` + long + `"}`, "422 invalid"},
		{"payment id with a line break", "POST", unknown + "/confirm", "", `{"paymentId":"a\nb"}`, "422 invalid"},
		{"payment time without an offset", "POST", unknown + "/confirm", "", `{"paymentId":"p","paidAt":"2026-12-01T04:31:00"}`, "422 invalid"},
		{"payment time beyond the calendar", "POST", unknown + "/confirm", "", `{"paymentId":"p","paidAt":"9999-12-31T23:59:59-12:00"}`, "422 invalid"},
		{"payment id as a number", "POST", unknown + "/confirm", "", `{"paymentId":1}`, "422 invalid"},
		{"wrong method", "PUT", "/v1/reservations", "ann", "", "405 method-not-allowed"},
		{"unknown path", "GET", "/v2/reservations", "ann", "", "404 not-found"},
	} {
		t.Run(tt.name, func(t *testing.T) { wantKind(t, call(t, server, tt.method, tt.path, tt.buyer, tt.body), tt.want) })
	}
	if report := testmysql.Audit(t, store, sale.ID); report.Available != 3 {
		t.Errorf("units moved: %+v", report.Counts)
	}
}

// An operator expects a hold to end after n seconds; without traffic and without a sweeper it stayed.
func TestCase026(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(2*time.Second).In(t, store)
	server := pod(t, store, sale)
	held := call(t, server, "POST", "/v1/reservations", "ann", "")
	wantKind(t, held, "201 HELD")
	var ended time.Time
	testmysql.Eventually(t, "the hold ends with no request and no sweeper", func() bool {
		return store.DB().QueryRow("SELECT changed_at FROM flashsale_reservation WHERE state = 4").Scan(&ended) == nil
	})
	expires, err := time.Parse(time.RFC3339Nano, held.body["expiresAt"].(string))
	if err != nil {
		t.Fatal(err)
	}
	if late := ended.Sub(expires); late < 0 || late > 2*time.Second {
		t.Errorf("the hold ended %v after its time", late)
	}
}

// Fifty sales of 5 units, each against many buyers at two pods: exactly 5 each.
func TestFiftySalesSellExactlyTheirUnits(t *testing.T) {
	clicks := 2_000 // "make soak" takes 20,000
	if n, err := strconv.Atoi(os.Getenv("FLASHSALE_TEST_CLICKS")); err == nil {
		clicks = n
	}
	store := testmysql.Store(t)
	for range 50 {
		sale := testmysql.Sale(5).In(t, store)
		pods := []*httptest.Server{pod(t, store, sale), pod(t, store, sale)}
		var mu sync.Mutex
		kinds := map[string]int{}
		next := make(chan int)
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				own := map[string]int{}
				for i := range next {
					own[click(t, pods[i%2], fmt.Sprint("buyer-", i))]++
				}
				mu.Lock()
				defer mu.Unlock()
				for k, n := range own {
					kinds[k] += n
				}
			})
		}
		for i := range clicks {
			next <- i
		}
		close(next)
		wg.Wait()
		if kinds["201"] != 5 || kinds["409"] != clicks-5 {
			t.Errorf("answers %v, want 5 held and %d refused", kinds, clicks-5)
		}
		for _, p := range pods {
			p.Close()
		}
	}
}

// click presses Buy and gives the status.
func click(t testing.TB, server *httptest.Server, buyer string) string {
	request, err := http.NewRequest("POST", server.URL+"/v1/reservations", nil)
	if err != nil {
		t.Error(err)
		return "error"
	}
	request.Header.Set("X-Buyer-Id", buyer)
	answer, err := server.Client().Do(request)
	if err != nil {
		t.Error(err)
		return "error"
	}
	defer func() { _ = answer.Body.Close() }()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		t.Error(err)
	}
	return fmt.Sprint(answer.StatusCode)
}

// One call reserved the same item on two lines, each was checked alone, and the stock went below zero.
func TestCase001(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).MaxPerBuyer(4).In(t, store)
	server := pod(t, store, sale)
	for _, body := range []string{`{"lines":[{"quantity":2},{"quantity":2}]}`, `[{"quantity":2},{"quantity":2}]`, `{"quantity":2}{"quantity":2}`} {
		wantKind(t, call(t, server, "POST", "/v1/reservations", "ann", body), "422 invalid")
	}
	wantKind(t, call(t, server, "POST", "/v1/reservations", "ann", `{"quantity":4}`), "409 sold-out")
	if report := testmysql.Audit(t, store, sale.ID); report.Available != 3 {
		t.Errorf("units moved: %+v", report.Counts)
	}
}

// All units were reserved, and the page still said "in stock".
func TestCase025(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).MaxPerBuyer(5).In(t, store)
	server := pod(t, store, sale)
	held := call(t, server, "POST", "/v1/reservations", "ann", `{"quantity":5}`)
	wantKind(t, held, "201 HELD")
	var stock response
	testmysql.Eventually(t, "the stock says that all is held", func() bool {
		stock = call(t, server, "GET", "/v1/stock", "", "")
		return stock.body["phase"] == "all-held"
	})
	if stock.body["available"] != 0.0 || stock.body["held"] != 5.0 || stock.body["nextExpiry"] != held.body["expiresAt"] {
		t.Errorf("the stock is %v, want nothing available, 5 held until %v", stock.body, held.body["expiresAt"])
	}
}

// Part of an order was cancelled, and nothing came back. Here a reservation is confirmed as a whole or not at all.
func TestCase052(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).MaxPerBuyer(5).In(t, store)
	server := pod(t, store, sale)
	path := call(t, server, "POST", "/v1/reservations", "ann", `{"quantity":5}`).header.Get("Location")
	wantKind(t, call(t, server, "POST", path+"/confirm", "", `{"paymentId":"pay","quantity":3}`), "422 invalid")
	wantKind(t, call(t, server, "DELETE", path, "ann", ""), "200 RELEASED")
	if report := testmysql.Audit(t, store, sale.ID); report.Available != 5 {
		t.Errorf("counts %+v", report.Counts)
	}
}

// A pod that shuts down answers, and sends its clients away with the answer.
func TestShutdownEndsConnections(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).In(t, store)
	server, api := podWith(t, store, sale, config(t))
	get := func() *http.Response {
		response, err := server.Client().Get(server.URL + "/v1/stock")
		if err != nil {
			t.Fatal(err)
		}
		if err := response.Body.Close(); err != nil {
			t.Fatal(err)
		}
		return response
	}
	if r := get(); r.StatusCode != http.StatusOK || r.Close {
		t.Errorf("status %d, connection closed %t", r.StatusCode, r.Close)
	}
	api.BeginShutdown()
	if r := get(); r.StatusCode != http.StatusOK || !r.Close || api.Ready() == nil {
		t.Errorf("shutting down: status %d, connection closed %t, readiness %v", r.StatusCode, r.Close, api.Ready())
	}
}

// Another header may name the buyer, and then the usual one does not.
func TestBuyerHeader(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(5).In(t, store)
	c := config(t)
	c.Identity.Header = "X-Customer"
	server, _ := podWith(t, store, sale, c)
	for header, want := range map[string]int{"X-Customer": http.StatusCreated, "X-Buyer-Id": http.StatusUnauthorized} {
		request, err := http.NewRequest(http.MethodPost, server.URL+"/v1/reservations", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set(header, "ann")
		response, err := server.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("named by %s: status %d, want %d", header, response.StatusCode, want)
		}
	}
}
