package httpapi_test

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/keys"
	"flashsale.dev/operator/test/testmysql"
)

// send makes a call with these headers and no others.
func send(t testing.TB, server *httptest.Server, method, path, body string, headers ...string) response {
	t.Helper()
	request, err := http.NewRequest(method, server.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
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
	return r
}

// Nobody reads, releases, confirms or refunds another's reservation; the checkout's calls are the checkout's.
func TestWhoMayDoWhat(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).In(t, store)
	server := pod(t, store, sale)
	held := call(t, server, "POST", "/v1/reservations", "ann", "")
	wantKind(t, held, "201 HELD")
	path := held.header.Get("Location")
	const ann, bob = "X-Buyer-Id: ann", "X-Buyer-Id: bob"
	token := "Authorization: Bearer " + theKeys.Current.CheckoutToken
	guessed := "Authorization: Bearer fsc_" + strings.Repeat("a", 52)
	for _, tt := range []struct{ name, method, path, header, want string }{
		{"nobody reserves", "POST", "/v1/reservations", "", "401 unauthenticated"},
		{"the checkout reserves for nobody", "POST", "/v1/reservations", token, "401 unauthenticated"},
		{"nobody reads", "GET", path, "", "401 unauthenticated"},
		{"another buyer reads", "GET", path, bob, "404 reservation-not-found"},
		{"nobody releases", "DELETE", path, "", "401 unauthenticated"},
		{"another buyer releases", "DELETE", path, bob, "404 reservation-not-found"},
		{"nobody confirms", "POST", path + "/confirm", "", "401 unauthenticated"},
		{"the buyer confirms himself", "POST", path + "/confirm", ann, "403 checkout-only"},
		{"a guessed token confirms", "POST", path + "/confirm", guessed, "401 unauthenticated"},
		{"the reservation's token confirms", "POST", path + "/confirm", "Authorization: Bearer " + held.body["token"].(string), "401 unauthenticated"},
		{"the buyer refunds himself", "POST", path + "/refund", ann, "403 checkout-only"},
		{"a guessed token refunds", "POST", path + "/refund", guessed, "401 unauthenticated"},
		{"a guessed token reads", "GET", path, guessed, "401 unauthenticated"},
		{"the buyer reads", "GET", path, ann, "200 HELD"},
		{"the checkout reads", "GET", path, token, "200 HELD"},
		{"the checkout confirms", "POST", path + "/confirm", token, "200 CONFIRMED"},
		{"the checkout refunds", "POST", path + "/refund", token, "200 REFUNDED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var headers []string
			if name, value, ok := strings.Cut(tt.header, ": "); ok {
				headers = []string{name, value}
			}
			got := send(t, server, tt.method, tt.path, `{"paymentId":"pay-1"}`[:min(21, 21*strings.Count(tt.path, "/confirm"))], headers...)
			wantKind(t, got, tt.want)
			if challenge := got.header.Get("WWW-Authenticate"); (got.status == 401) != (challenge == "Bearer") {
				t.Errorf("status %d with WWW-Authenticate %q", got.status, challenge)
			}
		})
	}
}

// The checkout verifies a reservation's token by the published keys alone.
func TestReservationTokensAreVerifiedOffline(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).MaxPerBuyer(2).In(t, store)
	server := pod(t, store, sale)
	buyer := `a"nn\`
	held := call(t, server, "POST", "/v1/reservations", buyer, `{"quantity":2}`)
	wantKind(t, held, "201 HELD")
	answer, err := server.Client().Get(server.URL + "/.well-known/jwks.json")
	if err != nil {
		t.Fatal(err)
	}
	published, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil || answer.Header.Get("Content-Type") != "application/jwk-set+json" {
		t.Fatalf("%v, %v", answer.Header, err)
	}
	set, err := keyfunc.NewJWKSetJSON(published)
	if err != nil {
		t.Fatal(err)
	}
	parse := func(text string, options ...jwt.ParserOption) (jwt.MapClaims, error) {
		claims := jwt.MapClaims{}
		_, err := jwt.ParseWithClaims(text, claims, set.Keyfunc, append(options, jwt.WithIssuer("flashsale"), jwt.WithValidMethods([]string{"EdDSA"}), jwt.WithExpirationRequired())...)
		return claims, err
	}
	token := held.body["token"].(string)
	claims, err := parse(token, jwt.WithAudience(sale.ID.String()))
	if err != nil || claims["jti"] != held.body["id"] || claims["sub"] != buyer || claims["quantity"] != 2.0 || claims["sku"] != sale.SKU {
		t.Errorf("claims %v, %v", claims, err)
	}
	expires, err := time.Parse(time.RFC3339Nano, held.body["expiresAt"].(string))
	if exp, _ := claims.GetExpirationTime(); err != nil || !exp.Equal(expires.Truncate(time.Second)) {
		t.Errorf("the token expires at %v, the hold at %v", exp, expires)
	}
	if _, err := parse(token, jwt.WithAudience("another sale")); err == nil {
		t.Error("the token is good for another sale")
	}
	if _, err := parse(token[:len(token)-4] + "AAAA"); err == nil {
		t.Error("a changed signature is good")
	}
	wantKind(t, call(t, server, "DELETE", held.header.Get("Location"), "", ""), "200 RELEASED")
	if read := call(t, server, "GET", held.header.Get("Location"), "", ""); read.body["token"] != nil {
		t.Error("a released reservation has a token")
	}
}

// A rotation needs no restart: the next keys are known before they are used, and the previous ones for a while.
func TestKeysAreRotatedWhileServing(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	path := filepath.Join(t.TempDir(), keys.FileName)
	set := keys.New(1)
	put := func(s keys.Set) {
		t.Helper()
		if err := os.WriteFile(path+".new", s.Encode(), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	put(set)
	c := config(t)
	file, err := keys.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	c.Identity.Keys = file
	server, _ := podWith(t, store, sale, c)
	held := call(t, server, "POST", "/v1/reservations", "ann", "")
	wantKind(t, held, "201 HELD")
	reads := func(token string) string {
		return send(t, server, "GET", held.header.Get("Location"), "", "Authorization", "Bearer "+token).kind()
	}
	next := set.Rotate(2)
	for _, token := range []string{set.Current.CheckoutToken, next.Current.CheckoutToken} {
		if got := reads(token); got != "200 HELD" {
			t.Errorf("before: %s", got)
		}
	}
	put(next)
	testmysql.Eventually(t, "the new file is read", func() bool { return reads(next.Next.CheckoutToken) == "200 HELD" })
	for _, token := range []string{set.Current.CheckoutToken, next.Current.CheckoutToken} {
		if got := reads(token); got != "200 HELD" {
			t.Errorf("after: %s", got)
		}
	}
}

func TestRateLimitsOverHTTP(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	c := config(t)
	c.Limits = admission.Limits{Buyer: admission.NewLimit("buyer", admission.Rate{PerSecond: 0.001, Burst: 3}),
		Address: admission.NewLimit("address", admission.Rate{PerSecond: 0.001, Burst: 6})}
	server, _ := podWith(t, store, sale, c)
	held := call(t, server, "POST", "/v1/reservations", "ann", "")
	wantKind(t, held, "201 HELD")
	if held.header.Get("RateLimit") != "" {
		t.Errorf("told of a limit that is far: %v", held.header)
	}
	near := call(t, server, "GET", held.header.Get("Location"), "ann", "")
	wantKind(t, near, "200 HELD")
	if near.header.Get("RateLimit-Policy") != `"buyer";q=3;w=3000` || near.header.Get("RateLimit") != `"buyer";r=1;t=2000` {
		t.Errorf("not told that the limit is near: %v", near.header)
	}
	wantKind(t, call(t, server, "POST", "/v1/reservations", "ann", ""), "200 HELD")
	over := call(t, server, "POST", "/v1/reservations", "ann", "")
	wantKind(t, over, "429 rate-limited")
	if over.header.Get("Retry-After") != "1000" || over.header.Get("RateLimit") != `"buyer";r=0;t=3000` {
		t.Errorf("not told when to come back: %v", over.header)
	}
	wantKind(t, call(t, server, "POST", "/v1/reservations", "bob", ""), "201 HELD")
	// A credential that is wrong counts, too: guessing is limited by the address.
	wantKind(t, send(t, server, "POST", "/v1/reservations", "", "Authorization", "Bearer fsc_guess"), "401 unauthenticated")
	wantKind(t, send(t, server, "POST", "/v1/reservations", "", "Authorization", "Bearer fsc_guess"), "429 rate-limited")
	elsewhere := send(t, server, "POST", "/v1/reservations", "", "X-Buyer-Id", "cat", "X-Forwarded-For", "198.51.100.7")
	wantKind(t, elsewhere, "201 HELD")
	wantKind(t, call(t, server, "POST", held.header.Get("Location")+"/confirm", "", `{"paymentId":"pay-1"}`), "200 CONFIRMED") // the checkout has no limit
}

// Another site makes a shopper's browser press Buy.
func TestOtherSitesCannotPressBuy(t *testing.T) {
	store := testmysql.Store(t)
	server := pod(t, store, testmysql.Sale(3).In(t, store))
	for name, tt := range map[string]struct{ header, value, want string }{
		"another site":          {"Sec-Fetch-Site", "cross-site", "403 cross-origin"},
		"another origin":        {"Origin", "https://evil.example", "403 cross-origin"},
		"the page itself":       {"Sec-Fetch-Site", "same-origin", "201 HELD"},
		"the page's own origin": {"Origin", server.URL, "201 HELD"},
	} {
		t.Run(name, func(t *testing.T) {
			wantKind(t, send(t, server, "POST", "/v1/reservations", "", "X-Buyer-Id", strings.ReplaceAll(name, " ", "-"), tt.header, tt.value), tt.want)
		})
	}
}

// A claim needs a solved challenge; being told no does not, nor does looking at one's own reservation.
func TestAChallengeBeforeTheClaim(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	c := config(t)
	c.Challenge = &admission.ProofOfWork{Keys: c.Identity.Keys, Difficulty: 50}
	server, _ := podWith(t, store, sale, c)
	wantKind(t, call(t, server, "POST", "/v1/reservations", "ann", ""), "403 challenge-required")
	wantKind(t, send(t, server, "GET", "/v1/challenge", ""), "401 unauthenticated")
	solution := func(buyer string) string {
		t.Helper()
		p := call(t, server, "GET", "/v1/challenge", buyer, "")
		if p.status != http.StatusOK || p.body["algorithm"] != "SHA-256" || p.body["maxnumber"] != 50.0 {
			t.Fatalf("%d %v", p.status, p.body)
		}
		for n := range 51 {
			if fmt.Sprintf("%x", sha256.Sum256(fmt.Append(nil, p.body["salt"], n))) == p.body["challenge"] {
				p.body["number"] = n
				text, err := json.Marshal(p.body)
				if err != nil {
					t.Fatal(err)
				}
				return base64.StdEncoding.EncodeToString(text)
			}
		}
		t.Fatal("no solution")
		return ""
	}
	anns := solution("ann")
	wantKind(t, send(t, server, "POST", "/v1/reservations", "", "X-Buyer-Id", "bob", "Challenge-Solution", anns), "403 challenge-required")
	held := send(t, server, "POST", "/v1/reservations", "", "X-Buyer-Id", "ann", "Challenge-Solution", anns)
	wantKind(t, held, "201 HELD")
	wantKind(t, call(t, server, "GET", held.header.Get("Location"), "ann", ""), "200 HELD")
	testmysql.Eventually(t, "others are told no without one", func() bool {
		return call(t, server, "POST", "/v1/reservations", "bob", "").kind() == "409 all-held"
	})
	wantKind(t, call(t, pod(t, store, sale), "GET", "/v1/challenge", "ann", ""), "404 not-found") // of a sale without
}
