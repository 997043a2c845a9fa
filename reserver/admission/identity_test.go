package admission

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"flashsale.dev/operator/reserver/keys"
	"flashsale.dev/operator/test/testmysql"
)

var theKeys = keys.New(1)

func keyFile(t testing.TB, set keys.Set) *keys.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), keys.FileName)
	if err := os.WriteFile(path, set.Encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := keys.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func request(remote string, headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/reservations", nil)
	r.RemoteAddr = remote
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	return r
}

func TestHeadersAreBelievedFromProxiesOnly(t *testing.T) {
	id := &Identity{Header: "X-Buyer-Id", Keys: keyFile(t, theKeys),
		Proxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}}
	const gateway, stranger = "10.1.2.3:4000", "203.0.113.9:4000"
	for name, tt := range map[string]struct {
		request *http.Request
		want    Caller
		refused bool
	}{
		"the gateway names a buyer":                     {request(gateway, "X-Buyer-Id", "ann"), Caller{Buyer: "ann", Address: netip.MustParseAddr("10.1.2.3"), Ambient: true}, false},
		"a stranger names one":                          {request(stranger, "X-Buyer-Id", "ann"), Caller{Address: netip.MustParseAddr("203.0.113.9")}, false},
		"the gateway over IPv6":                         {request("[fd00::1]:4000", "X-Buyer-Id", "ann"), Caller{Buyer: "ann", Address: netip.MustParseAddr("fd00::1"), Ambient: true}, false},
		"the gateway, its IPv4 address written as IPv6": {request("[::ffff:10.1.2.3]:4000", "X-Buyer-Id", "ann"), Caller{Buyer: "ann", Address: netip.MustParseAddr("10.1.2.3"), Ambient: true}, false},
		"two buyers":                                    {request(gateway, "X-Buyer-Id", "ann", "X-Buyer-Id", "bob"), Caller{}, true},
		"a buyer with a space":                          {request(gateway, "X-Buyer-Id", "ann b"), Caller{}, true},
		"a buyer too long":                              {request(gateway, "X-Buyer-Id", strings.Repeat("x", 129)), Caller{}, true},
		"an empty one":                                  {request(gateway, "X-Buyer-Id", ""), Caller{}, true},
		"behind the gateway":                            {request(gateway, "X-Forwarded-For", "198.51.100.7"), Caller{Address: netip.MustParseAddr("198.51.100.7")}, false},
		"behind two proxies":                            {request(gateway, "X-Forwarded-For", "198.51.100.7, 10.9.9.9"), Caller{Address: netip.MustParseAddr("198.51.100.7")}, false},
		"behind two proxies that send a line each":      {request(gateway, "X-Forwarded-For", "198.51.100.7", "X-Forwarded-For", "10.9.9.9"), Caller{Address: netip.MustParseAddr("198.51.100.7")}, false},
		"an address the client made up before it":       {request(gateway, "X-Forwarded-For", "1.2.3.4, 198.51.100.7"), Caller{Address: netip.MustParseAddr("198.51.100.7")}, false},
		"a stranger's own":                              {request(stranger, "X-Forwarded-For", "1.2.3.4"), Caller{Address: netip.MustParseAddr("203.0.113.9")}, false},
		"no address":                                    {request(gateway, "X-Forwarded-For", "unknown, 198.51.100.7, 10.9.9.9"), Caller{Address: netip.MustParseAddr("198.51.100.7")}, false},
		"nothing but no address":                        {request(gateway, "X-Forwarded-For", "'; DROP TABLE"), Caller{Address: netip.MustParseAddr("10.1.2.3")}, false},
		"a chain without end":                           {request(gateway, "X-Forwarded-For", "1.2.3.4"+strings.Repeat(", 10.0.0.1", 1000)), Caller{Address: netip.MustParseAddr("10.0.0.1")}, false},
		"the checkout":                                  {request(stranger, "Authorization", "Bearer "+theKeys.Current.CheckoutToken), Caller{Checkout: true, Address: netip.MustParseAddr("203.0.113.9")}, false},
		"the checkout, of the next keys":                {request(stranger, "Authorization", "bearer  "+theKeys.Next.CheckoutToken), Caller{Checkout: true, Address: netip.MustParseAddr("203.0.113.9")}, false},
		"somebody who would like to be the checkout":    {request(gateway, "Authorization", "Bearer fsc_"+strings.Repeat("a", 52)), Caller{}, true},
		"two credentials":                               {request(stranger, "Authorization", "Bearer "+theKeys.Current.CheckoutToken, "Authorization", "Bearer x"), Caller{}, true},
		"a credential for somebody else":                {request(gateway, "Authorization", "Basic YTpi", "X-Buyer-Id", "ann"), Caller{Buyer: "ann", Address: netip.MustParseAddr("10.1.2.3"), Ambient: true}, false},
		"a peer without an address":                     {request("@", "X-Buyer-Id", "ann"), Caller{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := id.Identify(tt.request)
			if errors.Is(err, ErrCredential) != tt.refused || err == nil && got != tt.want {
				t.Errorf("got %+v, %v; want %+v", got, err, tt.want)
			}
		})
	}
}

// issuer signs buyers' tokens, and serves its public keys.
type issuer struct {
	*httptest.Server
	jwks    atomic.Value // string
	fetched atomic.Int64
}

func newIssuer(t testing.TB) *issuer {
	i := &issuer{}
	i.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		i.fetched.Add(1)
		_, _ = w.Write([]byte(i.jwks.Load().(string)))
	}))
	t.Cleanup(i.Close)
	return i
}

func jwk(t testing.TB, kid string, public crypto.PublicKey) string {
	t.Helper()
	b64 := base64.RawURLEncoding.EncodeToString
	switch k := public.(type) {
	case ed25519.PublicKey:
		return fmt.Sprintf(`{"kty":"OKP","crv":"Ed25519","kid":%q,"x":%q}`, kid, b64(k))
	case *rsa.PublicKey:
		return fmt.Sprintf(`{"kty":"RSA","kid":%q,"n":%q,"e":%q}`, kid, b64(k.N.Bytes()), b64(big.NewInt(int64(k.E)).Bytes()))
	case *ecdsa.PublicKey:
		point, err := k.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"kty":"EC","crv":"P-256","kid":%q,"x":%q,"y":%q}`, kid, b64(point[1:33]), b64(point[33:]))
	}
	t.Fatalf("no JWK of a %T", public)
	return ""
}

func jwks(keys ...string) string { return `{"keys":[` + strings.Join(keys, ",") + `]}` }

func signed(t testing.TB, method jwt.SigningMethod, kid string, key any, claims jwt.MapClaims) string {
	t.Helper()
	token := jwt.NewWithClaims(method, claims)
	token.Header["kid"] = kid
	text, err := token.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestTokensThatNameABuyer(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ecKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, edKey, _ := ed25519.GenerateKey(rand.Reader)
	_, foreign, _ := ed25519.GenerateKey(rand.Reader)
	i := newIssuer(t)
	i.jwks.Store(jwks(jwk(t, "rsa", &rsaKey.PublicKey), jwk(t, "ec", &ecKey.PublicKey), jwk(t, "ed", edKey.Public())))
	verifier, err := NewToken(t.Context(), TokenOptions{Issuer: "https://id.shop.example", Audience: "drops", JWKS: i.URL, Claim: "sub", Leeway: 30 * time.Second}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	with := func(change func(jwt.MapClaims)) jwt.MapClaims {
		c := jwt.MapClaims{"iss": "https://id.shop.example", "aud": []string{"other", "drops"}, "sub": "ann", "iat": now.Unix(), "exp": now.Add(time.Hour).Unix()}
		if change != nil {
			change(c)
		}
		return c
	}
	der, err := x509.MarshalPKIXPublicKey(&rsaKey.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	publicPEM := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	good := signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(nil))
	parts := strings.Split(good, ".")
	other := base64.RawURLEncoding.EncodeToString([]byte(strings.Replace(string(mustDecode(t, parts[1])), "ann", "eve", 1)))
	for name, tt := range map[string]struct {
		token string
		want  string // "" for refused
	}{
		"EdDSA":                     {good, "ann"},
		"RS256":                     {signed(t, jwt.SigningMethodRS256, "rsa", rsaKey, with(nil)), "ann"},
		"PS512":                     {signed(t, jwt.SigningMethodPS512, "rsa", rsaKey, with(nil)), "ann"},
		"ES256":                     {signed(t, jwt.SigningMethodES256, "ec", ecKey, with(nil)), "ann"},
		"expired within the leeway": {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["exp"] = now.Add(-10 * time.Second).Unix() })), "ann"},
		"expired":                   {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["exp"] = now.Add(-time.Minute).Unix() })), ""},
		"never expires":             {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { delete(c, "exp") })), ""},
		"not valid yet":             {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["nbf"] = now.Add(time.Minute).Unix() })), ""},
		"issued in the future":      {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["iat"] = now.Add(time.Hour).Unix() })), ""},
		"for somebody else":         {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["aud"] = "newsletter" })), ""},
		"for nobody":                {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { delete(c, "aud") })), ""},
		"of another issuer":         {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["iss"] = "https://evil.example" })), ""},
		"of no buyer":               {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { delete(c, "sub") })), ""},
		"a buyer that is a number":  {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["sub"] = 7 })), ""},
		"a buyer with a line break": {signed(t, jwt.SigningMethodEdDSA, "ed", edKey, with(func(c jwt.MapClaims) { c["sub"] = "a\r\nb" })), ""},
		"signed by somebody else":   {signed(t, jwt.SigningMethodEdDSA, "ed", foreign, with(nil)), ""},
		"another key's name":        {signed(t, jwt.SigningMethodEdDSA, "rsa", edKey, with(nil)), ""},
		"alg none":                  {signed(t, jwt.SigningMethodNone, "ed", jwt.UnsafeAllowNoneSignatureType, with(nil)), ""},
		"the public key taken for a shared secret": {signed(t, jwt.SigningMethodHS256, "rsa", publicPEM, with(nil)), ""},
		"the claims changed":                       {parts[0] + "." + other + "." + parts[2], ""},
		"without a signature":                      {parts[0] + "." + parts[1] + ".", ""},
		"no token":                                 {"x", ""},
		"empty":                                    {"", ""},
		"too long":                                 {strings.Repeat("a", maxToken+1), ""},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // the second time from the cache, if at all
				got, err := verifier.Buyer(tt.token)
				if got != tt.want || errors.Is(err, ErrCredential) != (tt.want == "") {
					t.Errorf("got %q, %v; want %q", got, err, tt.want)
				}
			}
		})
	}

	// The issuer rotates its key: a token of the new one makes the verifier fetch it. A flood of made-up ones does not.
	_, fresh, _ := ed25519.GenerateKey(rand.Reader)
	i.jwks.Store(jwks(jwk(t, "fresh", fresh.Public())))
	testmysql.Eventually(t, "the new key is known", func() bool {
		got, err := verifier.Buyer(signed(t, jwt.SigningMethodEdDSA, "fresh", fresh, with(nil)))
		return err == nil && got == "ann"
	})
	before := i.fetched.Load()
	for n := range 100 {
		if _, err := verifier.Buyer(signed(t, jwt.SigningMethodEdDSA, fmt.Sprint("made-up-", n), foreign, with(nil))); err == nil {
			t.Fatal("a made-up key was believed")
		}
	}
	if n := i.fetched.Load() - before; n > 1 {
		t.Errorf("100 unknown keys made %d requests to the issuer", n)
	}
}

func mustDecode(t testing.TB, part string) []byte {
	t.Helper()
	b, err := base64.RawURLEncoding.DecodeString(part)
	if err != nil || !json.Valid(b) {
		t.Fatalf("%q: %v", part, err)
	}
	return b
}

// The issuer's keys may be a file, and must be there.
func TestKeysOfBuyersFromAFile(t *testing.T) {
	_, key, _ := ed25519.GenerateKey(rand.Reader)
	path := filepath.Join(t.TempDir(), "jwks.json")
	o := TokenOptions{Issuer: "i", Audience: "a", JWKS: path, Claim: "email"}
	if _, err := NewToken(t.Context(), o, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a file that is not there was accepted")
	}
	if err := os.WriteFile(path, []byte(jwks(jwk(t, "k", key.Public()))), 0o600); err != nil {
		t.Fatal(err)
	}
	verifier, err := NewToken(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	token := signed(t, jwt.SigningMethodEdDSA, "k", key, jwt.MapClaims{"iss": "i", "aud": "a", "email": "ann@shop.example", "exp": time.Now().Add(time.Hour).Unix()})
	if buyer, err := verifier.Buyer(token); err != nil || buyer != "ann@shop.example" {
		t.Errorf("%q, %v", buyer, err)
	}
}
