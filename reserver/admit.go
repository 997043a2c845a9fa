package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"net/textproto"
	"os"
	"strings"
	"time"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/httpapi"
	"flashsale.dev/operator/reserver/keys"
)

// admitFlags say who is let through to the claim.
type admitFlags struct {
	header, proxies, keys string
	token                 admission.TokenOptions
	buyer, address        admission.Rate
	maxInFlight           int
	challenge             string
	difficulty            int64
	verifyURL, verifyFile string
	trusted               []netip.Prefix
}

func newAdmitFlags(flags *flag.FlagSet) *admitFlags {
	a := &admitFlags{}
	flags.StringVar(&a.header, "buyer-header", "X-Buyer-Id", "HTTP header that names the buyer, believed from --trusted-proxies only")
	flags.StringVar(&a.proxies, "trusted-proxies", "", "comma-separated CIDRs of the shop's gateway, whose --buyer-header and X-Forwarded-For are believed; 0.0.0.0/0,::/0 believes everybody, which is safe only where nobody else can connect")
	flags.StringVar(&a.token.JWKS, "jwt-jwks", "", "URL or file of the public keys of those who sign buyers' tokens (JWKS); without it buyers have no tokens")
	flags.StringVar(&a.token.Issuer, "jwt-issuer", "", "iss of buyers' tokens")
	flags.StringVar(&a.token.Audience, "jwt-audience", "", "aud of buyers' tokens")
	flags.StringVar(&a.token.Claim, "jwt-buyer-claim", "sub", "claim of the token that names the buyer")
	flags.DurationVar(&a.token.Leeway, "jwt-leeway", 30*time.Second, "how far the issuer's clock may be off")
	flags.StringVar(&a.keys, "keys", "/etc/flashsale/keys/"+keys.FileName, "file with the checkout's tokens and the keys that sign reservations; read again when it changes")
	flags.Float64Var(&a.buyer.PerSecond, "buyer-rate", 5, "requests a second that a buyer may make; 0 is no limit")
	flags.IntVar(&a.buyer.Burst, "buyer-burst", 10, "requests that a buyer may make at once")
	flags.Float64Var(&a.address.PerSecond, "address-rate", 0, "requests a second that may come from an address (IPv6: from a /64); 0 is no limit")
	flags.IntVar(&a.address.Burst, "address-burst", 100, "requests that may come from an address at once")
	flags.IntVar(&a.maxInFlight, "max-in-flight", 20_000, "claims that may wait for the database; more are told to come back")
	flags.StringVar(&a.challenge, "challenge", "none", "what a buyer has to do before a claim: none, proof-of-work, or site-verify")
	flags.Int64Var(&a.difficulty, "challenge-difficulty", 50_000, "numbers to try in a proof of work; a browser tries some 100,000 a second")
	flags.StringVar(&a.verifyURL, "site-verify-url", "", "endpoint that verifies the tokens of a challenge's service, such as Turnstile's or hCaptcha's siteverify")
	flags.StringVar(&a.verifyFile, "site-verify-secret", "", "file with the secret for that; read again each time")
	return a
}

// check refuses what would let the wrong ones in, before anything is started.
func (a *admitFlags) check() error {
	for text := range strings.SplitSeq(a.proxies, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return usageError(fmt.Sprintf("--trusted-proxies: %q is no CIDR, such as 10.0.0.0/8", text))
		}
		a.trusted = append(a.trusted, p.Masked())
	}
	switch {
	case len(a.trusted) == 0 && a.token.JWKS == "":
		return usageError("nothing says who buyers are: set --trusted-proxies to the addresses of the gateway that sets --buyer-header, or --jwt-jwks, --jwt-issuer and --jwt-audience")
	case a.token.JWKS != "" && (a.token.Issuer == "" || a.token.Audience == "" || a.token.Claim == ""):
		return usageError("--jwt-jwks needs --jwt-issuer and --jwt-audience: else anybody's token for anything would name a buyer")
	case a.header == "" || a.maxInFlight < 1:
		return usageError("--buyer-header must not be empty, and --max-in-flight must be positive")
	case a.buyer.PerSecond < 0 || a.address.PerSecond < 0 || a.buyer.Burst < 1 || a.address.Burst < 1:
		return usageError("rates must not be negative, and bursts must be positive")
	case a.challenge != "none" && a.challenge != "proof-of-work" && a.challenge != "site-verify":
		return usageError("--challenge must be none, proof-of-work or site-verify")
	case a.difficulty < 1 || a.difficulty > 100_000_000:
		return usageError("--challenge-difficulty must be between 1 and 100,000,000")
	case a.challenge == "site-verify" && (a.verifyURL == "" || a.verifyFile == ""):
		return usageError("--challenge=site-verify needs --site-verify-url and --site-verify-secret")
	}
	return nil
}

// config reads the keys; those of buyers' issuer are read again until the context ends.
func (a *admitFlags) config(ctx context.Context, log *slog.Logger) (httpapi.Config, error) {
	config := httpapi.Config{MaxInFlight: a.maxInFlight,
		Identity: admission.Identity{Header: textproto.CanonicalMIMEHeaderKey(a.header), Proxies: a.trusted},
		Limits:   admission.Limits{Buyer: admission.NewLimit("buyer", a.buyer), Address: admission.NewLimit("address", a.address)}}
	var err error
	if config.Identity.Keys, err = keys.Open(a.keys); err != nil {
		return config, err
	}
	switch a.challenge {
	case "proof-of-work":
		config.Challenge = &admission.ProofOfWork{Keys: config.Identity.Keys, Difficulty: a.difficulty}
	case "site-verify":
		config.Challenge = admission.NewSiteVerify(a.verifyURL, func() (string, error) {
			text, err := os.ReadFile(a.verifyFile)
			return strings.TrimSpace(string(text)), err
		})
	}
	if a.token.JWKS != "" {
		config.Identity.Token, err = admission.NewToken(ctx, a.token, log)
	}
	return config, err
}

// printKeys prints a file of keys, for pods that no operator gives one.
func printKeys(_ context.Context, args []string) error {
	flags := flag.NewFlagSet("reserver keys", flag.ContinueOnError)
	rotate := flags.String("rotate", "", "file whose next keys become the current ones")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return err
	} else if err != nil {
		return usageError(err.Error())
	}
	set := keys.New(1)
	if *rotate != "" {
		text, err := os.ReadFile(*rotate)
		if err != nil {
			return fmt.Errorf("reading the keys: %w", err)
		}
		old, err := keys.Decode(text)
		if err != nil {
			return fmt.Errorf("reading the keys in %s: %w", *rotate, err)
		}
		set = old.Rotate(old.Generation + 1)
	}
	_, err := fmt.Printf("%s\n", set.Encode())
	return err
}
